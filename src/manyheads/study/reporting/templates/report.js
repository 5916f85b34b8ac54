"use strict";
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
const form = document.querySelector("form.filter");
if (form) {
  form.hidden = false;
  const rows = [...document.querySelectorAll("[data-outcome]")];
  const groups = [...document.querySelectorAll("[data-group]")];
  const plain = (text) => text.toLowerCase().replaceAll("−", "-");
  const text = new Map([...rows, ...groups].map((part) => [part, plain(part.textContent)]));
  const apply = () => {
    const words = plain(form.elements.search.value).split(/\s+/).filter(Boolean);
    const outcome = form.elements.outcome ? form.elements.outcome.value : "";
    let count = 0;
    for (const group of groups) {
      const own = rows.filter((row) => group.contains(row));
      const heading = plain(group.querySelector("h2, h3").textContent);
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
