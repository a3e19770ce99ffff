// Puts a search field above each table of the class "filtered"; it shows the rows with all words.
// A <div class="filter-all" data-tables="SELECTOR"> gets one field for several tables. Sections of
// which no row is left are hidden.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.filtered, .filtered table")) {
    addField(table, [table], "Filter the table");
  }
  for (const place of document.querySelectorAll(".filter-all")) {
    addField(place, [...document.querySelectorAll(place.dataset.tables)], place.dataset.label);
  }
});

function addField(before, tables, label) {
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = "Filter: words that a row must have";
  field.setAttribute("aria-label", label);
  before.before(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const table of tables) {
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      const section = tables.length > 1 && table.closest("section");
      if (section) section.hidden = rows.every((row) => row.hidden);
    }
  });
}
