"use strict";

/* Theme: follows the system until the reader chooses. */
const root = document.documentElement;
document.querySelector(".tools").hidden = false;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

/* Tables: a click on a heading sorts; unknown values stay last in either direction. */
const number = (text) => (text === "" || Number.isNaN(Number(text)) ? null : Number(text));

function sortTable(heading) {
  const row = heading.parentElement;
  const body = row.closest("table").tBodies[0];
  const column = [...row.cells].indexOf(heading);
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of row.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const sign = ascending ? 1 : -1;
  const key = (line) => line.cells[column].dataset.v;
  const lines = [...body.rows].sort((left, right) => {
    const [a, b] = [key(left), key(right)];
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [number(a), number(b)];
    return sign * (x !== null && y !== null ? x - y : a.localeCompare(b));
  });
  body.append(...lines);
}

for (const heading of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  button.addEventListener("click", () => sortTable(heading));
  heading.append(button);
  heading.setAttribute("aria-sort", "none");
}

/* Figures: values under the pointer. */
const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const owner = event.target.closest("[data-tip]");
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.dataset.tip;
  const space = innerWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, space))}px`;
  tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 12)}px`;
});

/* Token viewer. */
const digits = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toPrecision(3));
const shade = (kl) => (kl < 1e-3 ? "" : `k${Math.min(5, Math.floor((Math.log10(kl) + 3) / 0.6) + 1)}`);

function openViewer(viewer) {
  const data = JSON.parse(viewer.querySelector("script").textContent);
  const [contexts, arms] = [viewer.querySelector(".context"), viewer.querySelector(".arm")];
  const [tokens, detail] = [viewer.querySelector(".tokens"), viewer.querySelector(".detail")];
  const text = (id) => data.texts[id];
  let chosen = 0;

  /* What each side held likely, most likely first, where the run stored it. */
  function likely(context, arm) {
    const box = document.createElement("div");
    box.className = "likely";
    for (const [name, found] of [["reference", context.likely[chosen]], [arm.name, arm.likely[chosen]]]) {
      if (!found) continue;
      const [group, title, list] = ["div", "h4", "ol"].map((tag) => document.createElement(tag));
      title.textContent = `most likely for ${name}`;
      found[0].forEach((id, rank) => {
        const [item, share] = ["li", "span"].map((tag) => document.createElement(tag));
        share.textContent = `${(100 * found[1][rank]).toFixed(2)} %`;
        item.append(share, text(id));
        list.append(item);
      });
      group.append(title, list);
      box.append(group);
    }
    return box;
  }

  function choose(index, focus) {
    const context = data.contexts[contexts.value];
    const arm = context.arms[arms.value];
    chosen = Math.max(0, Math.min(index, context.target.length - 1));
    for (const old of tokens.querySelectorAll("[aria-selected=true]")) {
      old.setAttribute("aria-selected", "false");
      old.tabIndex = -1;
    }
    const token = tokens.children[chosen];
    token.setAttribute("aria-selected", "true");
    token.tabIndex = 0;
    if (focus) token.focus();
    const facts = [
      ["position", String(context.first + chosen)],
      ["true token", `${text(context.target[chosen])}  (${context.target[chosen]})`],
      ["reference's first", `${text(context.ref[chosen])}  (${context.ref[chosen]})`],
      ["its confidence", `${(100 * context.confidence[chosen]).toFixed(1)} %`],
      [`first of ${arm.name}`, `${text(arm.first[chosen])}  (${arm.first[chosen]})`],
      ["change", data.kinds[arm.kind[chosen]]],
      ...context.arms.map((other) => [`KL of ${other.name}`, digits(other.kl[chosen])]),
      [`ΔNLL of ${arm.name}`, digits(arm.nll[chosen])],
    ];
    const list = document.createElement("dl");
    for (const [name, value] of facts) {
      const [group, term, fact] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      term.textContent = name;
      fact.textContent = value;
      group.append(term, fact);
      list.append(group);
    }
    detail.replaceChildren(list, likely(context, arm));
  }

  function show() {
    const context = data.contexts[contexts.value];
    const arm = context.arms[arms.value];
    const items = context.target.map((id, index) => {
      const token = document.createElement("span");
      token.textContent = text(id);
      token.setAttribute("role", "option");
      token.setAttribute("aria-selected", "false");
      token.tabIndex = -1;
      token.className = shade(arm.kl[index]);
      if (arm.kind[index] !== 0) token.classList.add("moved");
      return token;
    });
    tokens.replaceChildren(...items);
    choose(arm.kl.indexOf(Math.max(...arm.kl)), false);
  }

  data.contexts.forEach((context, index) => contexts.add(new Option(`${context.name} (${context.stratum})`, index)));
  data.contexts[0].arms.forEach((arm, index) => arms.add(new Option(arm.name, index)));
  contexts.addEventListener("change", show);
  arms.addEventListener("change", show);
  tokens.addEventListener("click", (event) => {
    const index = [...tokens.children].indexOf(event.target);
    if (index >= 0) choose(index, true);
  });
  tokens.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20 };
    const ends = { Home: 0, End: tokens.children.length - 1 };
    if (!(event.key in steps) && !(event.key in ends)) return;
    event.preventDefault();
    choose(event.key in ends ? ends[event.key] : chosen + steps[event.key], true);
  });
  viewer.hidden = false;
  show();
}

document.querySelectorAll(".viewer").forEach(openViewer);
