"use strict";
// The cursor of the timeline: it goes through the columns by mouse, touch or keyboard, and the table says what is alive.
(() => {
  const source = document.getElementById("step-data");
  if (source === null) return;
  const data = JSON.parse(source.textContent);
  const summed = (differences) => {
    let sum = 0;
    return differences.map((one) => (sum += one));
  };
  const moments = summed(data.moments);
  const alive = data.alive.map(([component, name, columns, nbytes]) => ({ component, name, columns: summed(columns), nbytes }));
  const count = moments.length;

  const plot = document.getElementById("step-plot");
  const picture = plot.querySelector("svg");
  const areas = plot.querySelector(".areas");
  const cursor = plot.querySelector(".cursor");
  const controls = document.querySelector(".controls");
  const words = document.getElementById("step-words");
  const table = document.getElementById("step-alive");
  const shown = Number(table.dataset.shown);
  const legend = document.querySelector(".at-cursor");

  const exact = (nbytes) => `${nbytes.toLocaleString("en-US")} B`;
  const short = (nbytes) => {
    for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (nbytes >= factor) return `${(nbytes / factor).toFixed(2)} ${unit}`;
    }
    return `${nbytes} B`;
  };
  const size = (nbytes) => {
    const out = document.createElement("data");
    out.value = nbytes;
    out.title = exact(nbytes);
    out.textContent = short(nbytes);
    return out;
  };

  const bytesAt = (own, column) => {
    let low = 0;
    let high = own.columns.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (own.columns[middle] <= column) low = middle + 1;
      else high = middle;
    }
    return low === 0 ? 0 : own.nbytes[low - 1];
  };
  const spanAt = (moment) => {
    const found = data.spans.filter(([, , , first, last]) => first <= moment && moment <= last);
    if (!found.length) return "between";
    const [phase, number, chunk] = found[found.length - 1];
    const words = data.phases[phase] === "step" ? "optimizer step" : data.phases[phase];
    return `${words}${number ? ` of micro-batch ${number}` : ""}${chunk ? `, chunk ${chunk + 1}` : ""}`;
  };

  const labels = data.components.map((component) => {
    const entry = legend.querySelector(`[data-component="${component}"] .labelled`);
    return entry === null ? null : { entry, swatch: entry.querySelector("svg") };
  });
  const line = (name, component, nbytes) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.className = "code";
    head.textContent = name;
    const kind = document.createElement("td");
    if (component !== null) {
      const label = document.createElement("span");
      label.className = "labelled";
      label.append(labels[component].swatch.cloneNode(true), data.labels[component]);
      kind.append(label);
    }
    const numbers = [size(nbytes), nbytes.toLocaleString("en-US")].map((content) => {
      const cell = document.createElement("td");
      cell.className = "number";
      cell.append(content);
      return cell;
    });
    row.append(head, numbers[0], kind, numbers[1]);
    return row;
  };

  let at = data.peak;
  const show = (column) => {
    at = Math.min(Math.max(column, 0), count - 1);
    const moment = moments[at];
    const x = `${(100 * (at + 0.5)) / count}%`;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const here = alive.map((own) => ({ own, nbytes: bytesAt(own, at) })).filter(({ nbytes }) => nbytes > 0);
    here.sort((a, b) => b.nbytes - a.nbytes);
    const total = here.reduce((sum, { nbytes }) => sum + nbytes, 0);
    const where = `moment ${moment} of ${data.last}, ${spanAt(moment)}${at === data.peak ? ", the peak" : ""}`;
    const text = `${short(total)} alive at ${where}`;
    words.textContent = text;
    plot.setAttribute("aria-valuenow", at);
    plot.setAttribute("aria-valuetext", text);
    labels.forEach((label, component) => {
      if (label === null) return;
      const sum = here.reduce((all, { own, nbytes }) => all + (own.component === component ? nbytes : 0), 0);
      label.entry.querySelector("data").replaceWith(size(sum));
    });
    const rows = here.slice(0, shown).map(({ own, nbytes }) => line(own.name, own.component, nbytes));
    const rest = here.slice(shown);
    if (rest.length) rows.push(line(`${rest.length} more`, null, rest.reduce((sum, { nbytes }) => sum + nbytes, 0)));
    table.tBodies[0].replaceChildren(...rows);
    table.tFoot.replaceChildren(line("all", null, total));
    table.caption.textContent = at === data.peak ? "Alive at the peak" : `Alive at moment ${moment}`;
  };

  const far = Math.max(1, Math.round(count / 20));
  const keys = {
    ArrowLeft: () => at - 1,
    ArrowDown: () => at - 1,
    ArrowRight: () => at + 1,
    ArrowUp: () => at + 1,
    PageUp: () => at + far,
    PageDown: () => at - far,
    Home: () => 0,
    End: () => count - 1,
    p: () => data.peak,
    P: () => data.peak,
  };
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    show(keys[event.key]());
  });
  const follow = (event) => {
    const box = picture.getBoundingClientRect();
    show(Math.floor((count * (event.clientX - box.left)) / box.width));
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  const go = { back: () => at - 1, on: () => at + 1, peak: () => data.peak };
  for (const button of controls.querySelectorAll("button")) {
    button.addEventListener("click", () => show(go[button.dataset.go]()));
  }

  // The areas are stretched to the picture's size; their patterns are not.
  const boxes = Array.from(plot.querySelectorAll(".band svg"), (box) => ({ box, text: box.querySelector("text") }));
  const unstretch = () => {
    const box = areas.getBoundingClientRect();
    if (!box.width) return;
    const scale = `scale(${count / box.width} ${1000 / box.height})`;
    for (const pattern of areas.querySelectorAll("pattern")) pattern.setAttribute("patternTransform", scale);
  };
  // Words without room are left out.
  const fit = () => {
    const sizes = boxes.filter(({ text }) => text).map(({ box, text }) => {
      return { text, fits: box.width.baseVal.value > text.getComputedTextLength() + 2 };
    });
    for (const { text, fits } of sizes) text.setAttribute("visibility", fits ? "visible" : "hidden");
  };
  new ResizeObserver(() => {
    unstretch();
    fit();
  }).observe(picture);

  plot.tabIndex = 0;
  plot.setAttribute("role", "slider");
  plot.setAttribute("aria-label", "Moment of the step");
  plot.setAttribute("aria-valuemin", 0);
  plot.setAttribute("aria-valuemax", count - 1);
  controls.hidden = false;
  show(data.peak);
})();
