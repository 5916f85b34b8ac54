"use strict";
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
const form = document.querySelector("form.filter");
if (form) {
  form.hidden = false;
  const rows = [...document.querySelectorAll("[data-outcome]")];
  const groups = [...document.querySelectorAll("[data-group]")];
  const text = new Map([...rows, ...groups].map((part) => [part, part.textContent.toLowerCase()]));
  const apply = () => {
    const words = form.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcome = form.elements.outcome.value;
    let count = 0;
    for (const group of groups) {
      const own = rows.filter((row) => group.contains(row));
      const heading = group.querySelector("h2, h3").textContent.toLowerCase();
      let kept = 0;
      for (const row of own) {
        const matches = words.every((word) => text.get(row).includes(word) || heading.includes(word));
        const shown = matches && (!outcome || row.dataset.outcome.split(" ").includes(outcome));
        row.hidden = !shown;
        kept += shown;
      }
      group.hidden = own.length ? !kept : !(words.every((word) => text.get(group).includes(word)) && !outcome);
      if (group.tagName === "SECTION") count += kept;
    }
    form.querySelector("output").textContent = words.length || outcome ? `${count} shown` : "";
  };
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.closest("[hidden]")) { form.reset(); setTimeout(() => target.scrollIntoView()); }
  });
}
