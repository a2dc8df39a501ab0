"""Reports: from verified run folders to pages that people paste into a model card, a pull request and a paper."""
