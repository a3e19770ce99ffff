// Puts a search field above each table of the class "filtered". It shows the rows with all words.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.filtered, .filtered table")) {
    const field = document.createElement("input");
    field.type = "search";
    field.className = "filter";
    field.placeholder = "Filter: words that a row must have";
    field.setAttribute("aria-label", "Filter the table");
    table.before(field);
    const rows = [...table.tBodies[0].rows];
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
});
