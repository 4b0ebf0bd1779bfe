"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const tip = document.querySelector(".tip");

  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
    const top = y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18;
    tip.style.transform = `translate(${left}px, ${top}px)`;
  }
  const hideTip = () => { tip.hidden = true; };

  // Exact numbers and conditions of a cell or bar, by pointer and by keyboard.
  document.addEventListener("pointerover", (event) => {
    const place = event.target.closest("[data-tip]");
    if (place) showTip(place.dataset.tip, event.clientX, event.clientY);
    else if (!event.target.closest("svg.plot")) hideTip();
  });
  document.addEventListener("focusin", (event) => {
    const place = event.target.closest("[data-tip]");
    if (!place || !place.matches(":focus-visible")) return;
    const box = place.getBoundingClientRect();
    showTip(place.dataset.tip, box.left, box.bottom - 12);
  });
  // A tap shows a tip before it moves the focus, so the place that is left must not hide what the next one shows.
  const showsTip = (place) => Boolean(place?.closest?.("[data-tip], svg.plot"));
  document.addEventListener("focusout", (event) => { if (!showsTip(event.relatedTarget)) hideTip(); });
  addEventListener("scroll", hideTip, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // The nearest point of a chart; arrow keys go along a line and from line to line.
  function axis(text) {
    const [low, high, start, end, log] = text.split(" ").map(Number);
    const scale = log ? Math.log10 : (value) => value;
    return (value) => start + (scale(value) - scale(low)) / (scale(high) - scale(low)) * (end - start);
  }
  function linesOf(plot) {
    if (!plot.lines) {
      const across = axis(plot.dataset.x), up = axis(plot.dataset.y);
      plot.lines = all("g[data-p]", plot).map((group) => ({
        group,
        told: group.dataset.told && JSON.parse(group.dataset.told),
        points: group.dataset.p.split(" ").map((text) => {
          const [x, y, width] = text.split(",").map(Number);
          return { x, y, width, px: across(x), py: up(y) };
        }),
      }));
    }
    return plot.lines.filter(({ group }) => !group.classList.contains("dim"));
  }
  const said = (value) => Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  function point(plot, line, index) {
    const at = line.points[index];
    plot.at = { line, index };
    unmark(plot);
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    mark.setAttribute("class", "cursor");
    mark.setAttribute("cx", at.px);
    mark.setAttribute("cy", at.py);
    mark.setAttribute("r", 4);
    line.group.append(mark);
    if (line.told) return line.told[index];
    const spread = Number.isFinite(at.width) ? ` ± ${said(at.width)}` : "";
    return `${line.group.dataset.name}\n${said(at.y)}${spread}${plot.dataset.unit || ""} at ${said(at.x)} (${plot.dataset.over})`;
  }
  const unmark = (plot) => all(".cursor", plot).forEach((mark) => mark.remove());
  function leave(plot) {
    unmark(plot);
    hideTip();
  }
  for (const plot of all("svg.plot")) {
    const nearest = (event) => {
      const box = plot.getBoundingClientRect(), size = plot.viewBox.baseVal;
      const x = (event.clientX - box.left) / box.width * size.width, y = (event.clientY - box.top) / box.height * size.height;
      let best = null, least = Infinity;
      for (const line of linesOf(plot)) {
        line.points.forEach((at, index) => {
          const far = (at.px - x) ** 2 + (at.py - y) ** 2;
          if (far < least) { least = far; best = [line, index]; }
        });
      }
      if (best && least < 60 ** 2) showTip(point(plot, ...best), event.clientX, event.clientY);
      else leave(plot);
    };
    plot.addEventListener("pointermove", nearest);
    plot.addEventListener("pointerdown", nearest);
    // A finger leaves as soon as it is lifted; what a tap shows stays until the next one.
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") leave(plot); });
    plot.addEventListener("blur", () => unmark(plot));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      const lines = linesOf(plot);
      if (!step || !lines.length) return;
      event.preventDefault();
      const row = plot.at ? Math.max(0, lines.indexOf(plot.at.line)) : 0;
      const line = lines[(row + (plot.at ? step[0] : 0) + lines.length) % lines.length];
      const index = Math.max(0, Math.min(line.points.length - 1, plot.at ? plot.at.index + step[1] : 0));
      const text = point(plot, line, index), box = plot.getBoundingClientRect(), size = plot.viewBox.baseVal;
      showTip(text, box.left + line.points[index].px / size.width * box.width, box.top + line.points[index].py / size.height * box.height);
    });
  }

  // Words above a table say that it goes on to the right, until its end is seen.
  const goesOn = (scroll) => {
    scroll.parentNode.classList.toggle("goes-on", scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 1);
  };
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => goesOn(target.closest(".scroll"))));
  for (const scroll of all(".scroll")) {
    scroll.addEventListener("scroll", () => goesOn(scroll), { passive: true });
    sizes.observe(scroll);
    sizes.observe(scroll.firstElementChild);
  }

  // Sorting: numbers by value, texts by their words; empty cells and networks without a number stay last.
  function key(row, column) {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = (cell.querySelector("span") ?? cell).textContent.trim(), number = parseFloat(text.replace(/,/g, "").replace("−", "-"));
    if (["", "–", "N/C"].includes(text)) return null;
    return /^[+−-]?[\d.,]/.test(text) && Number.isFinite(number) ? number : text.toLowerCase();
  }
  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }
  for (const button of all("button[data-sort]")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), body = head.closest("table").tBodies[0], was = head.getAttribute("aria-sort");
      const down = was === "ascending";
      body.asWritten ??= [...body.rows];
      all("th", head.parentNode).forEach((other) => other.removeAttribute("aria-sort"));
      if (was === "descending") return body.append(...body.asWritten);
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [key(row, head.cellIndex), row]);
      const found = (pair) => pair[0] === null;
      rows.sort((a, b) => found(a) || found(b) ? compare(a[0], b[0]) : (down ? -1 : 1) * compare(a[0], b[0]));
      body.append(...rows.map(([, row]) => row));
    });
  }

  // The filter hides rows, pictures and sections, and dims lines of other operators; all words must be found in
  // a row, the heads of its table or the title of its section, and "several words" in quotes together.
  const form = document.querySelector("[data-filter]");
  const chosen = (name) => form.elements[name].value.trim();
  const phrases = (text) => [...text.toLowerCase().matchAll(/"([^"]+)"|[^\s"]+/g)].map((found) => found[1] ?? found[0]);
  const words = (element) => (element ? element.words ??= element.textContent.toLowerCase().replaceAll("\u00a0", " ") : "");
  function around(element, section) {
    const { title = "", table = "" } = section.dataset;
    const held = element.closest(".held");
    const heading = held ? words(held.querySelector("thead")) + words(held.querySelector("h3")) : "";
    const gallery = words(element.closest(".gallery")?.querySelector("h3"));
    return [title.toLowerCase(), table.toLowerCase(), heading, gallery, words(element.closest("figure")?.querySelector("figcaption"))].join("\n");
  }
  const matches = (element, section, wanted) =>
    !wanted.length || wanted.every(((context) => (word) => context.includes(word) || words(element).includes(word))(around(element, section)));
  // A fold opens where nothing else is left of its part, and closes again with the filter.
  const unfolded = [];
  const hidesAll = (part) => part.parentNode.matches("section:not(.left-out)") && part === part.parentNode.firstElementChild
    || part.matches(".pictures:not([hidden])") && !part.previousElementSibling.querySelector("figure:not([hidden])");
  function unfold(part) {
    if (part.open) return;
    part.open = true;
    unfolded.push(part);
  }
  function apply() {
    const wanted = phrases(chosen("text")), operator = chosen("operator"), table = chosen("table"), scale = chosen("scale");
    const filtered = Boolean(wanted.length || operator || table || scale);
    const inside = (element, section) => {
      const tables = (element.closest("[data-table]") ?? section).dataset.table ?? "";
      const own = (element.closest("[data-scale]") ?? section).dataset.scale;
      return (!table || tables.split("\n").includes(table)) && (!scale || own === scale);
    };
    let shown = 0, total = 0, sections = 0;
    for (const section of all("main > section")) {
      let kept = 0;
      for (const row of all("tbody tr, .left-out li, .statements li, .bar", section)) {
        const own = row.dataset.operator, fits = !operator || own === undefined || own === operator;
        const visible = fits && inside(row, section) && matches(row, section, wanted);
        row.hidden = !visible;
        kept += visible;
        if (row.matches("tr")) { shown += visible; total += 1; }
      }
      for (const figure of all("figure", section)) {
        const lines = all("g[data-operator], li[data-operator]", figure);
        const own = !operator || figure.matches(".bars") || [figure, ...lines].some((part) => part.dataset.operator === operator);
        const empty = figure.matches(".bars") && !figure.querySelector(".bar:not([hidden])");
        figure.hidden = empty || !own || !inside(figure, section) || (!figure.matches(".bars") && !matches(figure, section, wanted));
        lines.forEach((line) => line.classList.toggle("dim", Boolean(operator) && line.dataset.operator !== operator));
        kept += !figure.hidden;
      }
      for (const gallery of all(".gallery", section)) gallery.hidden = !gallery.querySelector("figure:not([hidden])");
      for (const part of all(".held, details.more", section)) part.hidden = filtered && !part.querySelector("tbody tr:not([hidden]), figure:not([hidden])");
      section.hidden = filtered && !kept;
      if (filtered && !section.hidden) all("details", section).filter(hidesAll).forEach(unfold);
      sections += !section.hidden;
    }
    if (!filtered) unfolded.splice(0).forEach((part) => { part.open = false; });
    document.querySelector(".nothing").hidden = sections > 0;
    form.elements.count.value = filtered ? `${shown} of ${total} rows` : "";
    for (const entry of all(".toc li")) {
      const [title, ...scales] = all("a", entry), links = scales.length ? scales : [title];
      links.forEach((link) => { link.hidden = Boolean(document.getElementById(link.hash.slice(1))?.hidden); });
      const first = links.find((link) => !link.hidden);
      entry.hidden = !first;
      if (first) title.setAttribute("href", first.getAttribute("href"));
    }
  }
  if (form) {
    form.hidden = false;
    form.addEventListener("input", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Whoever follows a link to a folded section wants to read it.
  function openAimedAt() {
    const part = document.getElementById(location.hash.slice(1))?.firstElementChild;
    if (!part?.matches("details")) return;
    part.open = true;
    if (unfolded.includes(part)) unfolded.splice(unfolded.indexOf(part), 1); // it stays open when a filter goes
  }
  addEventListener("hashchange", openAimedAt);
  openAimedAt();
  document.addEventListener("click", (event) => { if (event.target.closest('a[href^="#"]')) setTimeout(openAimedAt); });

  // Light, dark, or what the system says; page.html?theme=dark asks for one.
  const button = document.querySelector("[data-theme-button]"), themes = ["system", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("hyperball-theme"); } catch { return null; } };
  function setTheme(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    button.dataset.themeButton = theme;
  }
  button.hidden = false;
  const asked = [new URLSearchParams(location.search).get("theme"), stored()];
  setTheme(asked.find((theme) => themes.includes(theme)) || "system");
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(button.dataset.themeButton) + 1) % themes.length];
    setTheme(next);
    try { localStorage.setItem("hyperball-theme", next); } catch { /* a page from a file may have no storage */ }
  });

  // Paper has no folds, but for parts that are folded whole: shorter scales of a table, the list of every run.
  let folded = [];
  addEventListener("beforeprint", () => {
    const closed = all("details:not([open])").filter((part) => !part.closest("section > details:first-child:not([open])"));
    closed.forEach((part) => { part.open = true; });
    folded.push(...closed);
  });
  addEventListener("afterprint", () => {
    folded.forEach((part) => { part.open = false; });
    folded = [];
  });
})();
