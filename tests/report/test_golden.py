"""The fixed run gives the fixed report, character by character.

After a wanted change, look at the difference and write the files again:
`exl3eval report tests/data/report_run --model-name "qwen2-tied 5 bpw" --format md,tex,json --out OUT`, then copy
report.md, model-card.md, paper.tex and report.json to tests/data/report_run/expected.
"""

import json
import re
from pathlib import Path

import pytest

from exl3eval.report.latex import render_latex
from exl3eval.report.markdown import render_markdown, render_model_card
from exl3eval.report.reproduce import report_json
from exl3eval.report.sections import build_document
from exl3eval.report.study import load_study
from exl3eval.verify import first_difference

RUN = Path(__file__).parents[1] / "data" / "report_run"
EXPECTED = RUN / "expected"


@pytest.fixture(scope="module")
def study():
    return load_study([RUN], model_name="qwen2-tied 5 bpw")


@pytest.fixture(scope="module")
def document(study):
    return build_document(study)


def test_markdown(document):
    assert render_markdown(document) == (EXPECTED / "report.md").read_text(encoding="utf-8")


def test_model_card(document, study):
    assert render_model_card(document, study) == (EXPECTED / "model-card.md").read_text(encoding="utf-8")


def test_latex(document):
    assert render_latex(document) == (EXPECTED / "paper.tex").read_text(encoding="utf-8")


def test_json_up_to_the_last_bits_of_sums(document, study):
    fresh = json.loads(json.dumps(report_json(study, document), allow_nan=False))
    stored = json.loads((EXPECTED / "report.json").read_text(encoding="utf-8"))
    assert first_difference(stored, fresh, "report") is None


def test_model_card_metadata_is_what_the_hub_reads(document, study):
    from huggingface_hub import ModelCard

    card = ModelCard(render_model_card(document, study, base_model="owner/model"))
    assert card.data.base_model == "owner/model"
    assert card.data.model_name == "qwen2-tied 5 bpw"
    means = [result for result in card.data.eval_results if result.metric_type == "kl_divergence"]
    assert [result.metric_value for result in means] == [study.runs[0].results["arms"]["int8-embed"]["kl"]["mean"]]


def test_no_format_holds_a_local_path(document, study):
    for text in (
        render_markdown(document),
        render_model_card(document, study),
        render_latex(document),
        json.dumps(report_json(study, document)),
    ):
        assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|usr|var|mnt|Users)/", text)
        assert str(Path(__file__).parents[2]) not in text


def test_tables_of_markdown_have_one_cell_per_column(document):
    lines = render_markdown(document).splitlines()
    for index, line in enumerate(lines):
        if set(line) <= set("|:- ") and line.startswith("| "):
            count = len(re.split(r"(?<!\\)\|", line))
            following = index - 1
            while following < len(lines) and lines[following].startswith("|"):
                assert len(re.split(r"(?<!\\)\|", lines[following])) == count, lines[following]
                following += 1


def test_latex_braces_and_environments_are_balanced(document):
    text = re.sub(r"\\[\\{}%]", "", render_latex(document))
    assert text.count("{") == text.count("}")
    open_environments = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text.split(r"\begin{document}", 1)[1]):
        if kind == "begin":
            open_environments.append(name)
        elif name != "document":
            assert open_environments.pop() == name
    assert not open_environments
    assert text.isascii()
