"use strict";
// Sorting by the buttons in the headings, and searching by words.
(() => {
  const named = new Intl.Collator(undefined, { numeric: true });
  const keyOf = (cell) => (cell.dataset.n === undefined ? cell.textContent : Number(cell.dataset.n));
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === "number") return -1;
    return typeof b === "number" ? 1 : named.compare(a, b);
  };

  const sort = (table, heading) => {
    const column = heading.cellIndex;
    const numeric = heading.classList.contains("number");
    const before = heading.getAttribute("aria-sort");
    const first = numeric ? "descending" : "ascending";
    const other = numeric ? "ascending" : "descending";
    const order = before === first ? other : first;
    const sign = order === "ascending" ? 1 : -1;
    for (const each of heading.parentElement.cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[column]) }));
    rows.sort((a, b) => sign * compare(a.key, b.key));
    body.append(...rows.map((each) => each.row));
  };

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    for (const heading of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      button.addEventListener("click", () => sort(table, heading));
      heading.replaceChildren(button);
    }
  }

  for (const search of document.querySelectorAll(".search")) {
    const table = document.getElementById(search.dataset.for);
    const field = search.querySelector("input");
    const found = search.querySelector("output");
    const rows = Array.from(table.tBodies[0].rows, (row) => ({ row, text: row.textContent.toLowerCase() }));
    const show = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const { row, text } of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        count += row.hidden ? 0 : 1;
      }
      found.textContent = words.length ? `${count} of ${rows.length} rows` : "";
    };
    field.addEventListener("input", show);
    search.hidden = false;
  }
})();
