"""The HTML of a page and its style sheet: light, dark, on a phone and on paper."""

from __future__ import annotations

STYLE = """
  :root {
    color-scheme: light dark;
    --paper: #ffffff; --ink: #222222; --soft: #5b6068; --rule: #dfe1e5; --box: #f5f6f8;
    --link: #0b61a4; --row: #f2f7fc; --shade: #0003;
  }
  @media (prefers-color-scheme: dark) {
    :root {
      --paper: #16181d; --ink: #e6e7ea; --soft: #a9aeb8; --rule: #363b44; --box: #1f2228;
      --link: #7cc0f5; --row: #20262e; --shade: #000a;
    }
  }
  * { box-sizing: border-box; }
  body {
    font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem;
    color: var(--ink); background: var(--paper); overflow-wrap: break-word;
  }
  h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 0.5rem; }
  h2 { font-size: 1.15rem; display: inline; margin: 0; }
  a { color: var(--link); }
  .lead { font-size: 1.15rem; max-width: 46rem; }
  .note, figcaption { font-size: 0.9rem; color: var(--soft); max-width: 46rem; }
  p, li { max-width: 46rem; } li { margin: 0.4rem 0; }
  figure { margin: 1rem 0; overflow-x: auto; }
  figure img { display: block; width: 40rem; max-width: 100%; height: auto; border-radius: 6px; }
  figure.panels img { width: 46rem; }
  .top figure img { width: 44rem; }
  /* The shadows lie below covers of the page's colour that scroll with the table. */
  .wide {
    overflow-x: auto; margin: 1rem 0;
    background:
      linear-gradient(to left, var(--paper) 30%, transparent) right / 3rem 100% local no-repeat,
      linear-gradient(to left, var(--shade), transparent) right / 1rem 100% scroll no-repeat;
  }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
  th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
  th, td { text-align: left; vertical-align: baseline; }
  th { white-space: normal; vertical-align: bottom; font-weight: 600; }
  .number { text-align: right; }
  td.long { white-space: normal; min-width: 14rem; }
  tbody tr:hover td { background: var(--row); }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
  .top table { font-size: 1rem; } strong { font-weight: 700; }
  .chip {
    display: inline-block; width: 0.75em; height: 0.75em; margin-right: 0.5em; border-radius: 2px;
  }
  .pad { visibility: hidden; }
  nav { margin: 1.5rem 0; padding: 0.7rem 1rem; background: var(--box); border-radius: 6px; }
  nav p { margin: 0.2rem 0; max-width: none; }
  nav ul { list-style: none; margin: 0; padding: 0; columns: 15rem; }
  nav li { margin: 0; break-inside: avoid; } nav li a { display: block; padding: 0.2rem 0; }
  details { border-top: 1px solid var(--rule); }
  details:last-of-type { border-bottom: 1px solid var(--rule); }
  summary { cursor: pointer; padding: 0.7rem 0; }
  summary:hover h2 { text-decoration: underline; }
  :focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
  .body { padding: 0 0 1.5rem; scroll-margin-top: 3.5rem; } .body > :first-child { margin-top: 0; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; }
  dt { color: var(--soft); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
  pre { background: var(--box); padding: 0.8rem; overflow-x: auto; border-radius: 6px; }
  @media (max-width: 40rem) {
    body { padding: 1rem 0.8rem; } h1 { font-size: 1.35rem; } .lead { font-size: 1.05rem; }
    figure.panels img { max-width: none; width: 34rem; }
    th, td { padding: 0.3rem 0.5rem; } .top table { font-size: 0.9rem; }
    dl { display: block; } dd { margin-bottom: 0.5rem; }
    th:first-child, td:first-child {
      min-width: 7.5rem; max-width: 8.5rem; white-space: normal; overflow-wrap: anywhere;
    }
  }
  @media print {
    :root {
      color-scheme: light;
      --paper: #fff; --ink: #000; --soft: #444; --rule: #bbb; --box: #f5f5f5; --link: #000;
    }
    body { max-width: none; padding: 0; font-size: 10pt; }
    nav, .long-table { display: none; }
    details::details-content { content-visibility: visible; block-size: auto; }
    summary { list-style: none; break-after: avoid; }
    figure, tr { break-inside: avoid; }
    figure, .wide { overflow: visible; }
    table { font-size: 7pt; } th, td { padding: 0.1rem 0.25rem; white-space: normal; }
    figure img, figure.panels img { width: 13cm; max-width: 100%; }
  }
"""

PAGE = """{% macro table(section) -%}
<div class="wide{{ ' long-table' if section.rows|length > 100 }}" tabindex="0" role="region"
 aria-label="{{ section.heading or 'Summary' }}, table"><table>
<thead><tr>{% for name in section.header %}<th scope="col" class="{{ section.kind(loop.index0) }}">
{{- name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in section.cells %}<tr>{% for cell in row -%}
<td class="{{ section.kind(loop.index0) }}">
{%- if cell.chip %}<span class="chip" style="background: {{ cell.chip }}"></span>{% endif -%}
{% if cell.best %}<strong>{{ cell.text }}</strong>{% else %}{{ cell.text }}{% endif -%}
{% if cell.pad %}<span class="pad" aria-hidden="true">{{ cell.pad }}</span>{% endif %}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>
{%- endmacro %}
{% macro picture(one) -%}
<figure{% if one.wide %} class="panels" tabindex="0" aria-label="{{ one.alt }}"{% endif %}>
<img alt="{{ one.alt }}" src="data:image/svg+xml;base64,{{ one.svg }}">
{% if one.caption %}<figcaption>{{ one.caption }}</figcaption>{% endif %}</figure>
{%- endmacro %}
{% macro content(section) %}
{% for paragraph in section.paragraphs %}<p>{{ paragraph }}</p>
{% endfor %}
{% if section.items %}<ul>
{% for item in section.items %}<li>{{ item }}</li>
{% endfor %}</ul>{% endif %}
{% if section.definitions %}<dl>
{% for term, text in section.definitions %}<dt>{{ term }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl>{% endif %}
{% if section.links %}<ul>
{% for text, file in section.links %}<li><a href="{{ file|urlencode }}">{{ text }}</a></li>
{% endfor %}</ul>{% endif %}
{% for one in section.pictures -%}
{{ picture(one) }}
{% endfor %}
{% if section.rows %}{{ table(section) }}{% endif %}
{% if section.note %}<p class="note">{{ section.note }}</p>{% endif %}
{% if section.code %}<pre tabindex="0">{{ section.code }}</pre>{% endif %}
{% endmacro -%}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header class="top">
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
{% if top %}
{% if top.rows %}{{ table(top) }}{% endif %}
{% if top.note %}<p class="note">{{ top.note }}</p>{% endif %}
{% for one in top.pictures %}{{ picture(one) }}
{% endfor %}
{% endif %}
</header>
{% if sections|length > 1 or files %}
<nav aria-label="Contents">
<ul>{% for section in sections %}
<li><a href="#{{ section.anchor }}">{{ section.heading }}</a></li>{% endfor %}</ul>
{% if files %}<p>Data: {% for file in files -%}
<a download="{{ file.name }}" href="data:{{ file.kind }};base64,{{ file.content }}">
{{- file.name }}</a>{{ ", " if not loop.last }}{% endfor %}</p>{% endif %}
</nav>
{% endif %}
<main>
{% for section in sections %}
<details{{ " open" if section.shown }}><summary><h2>{{ section.heading }}</h2></summary>
<div class="body" id="{{ section.anchor }}">{{ content(section) }}</div></details>
{% endfor %}
</main>
</body>
</html>
"""
