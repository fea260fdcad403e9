"use strict";
// Draws the figures of the page. Their data is JSON in the page: `figures` for plotly, `profiles` for the heat maps by layer and head.
(() => {
  const PRINTED = { width: 670, height: 780, points: 380 }; // pixels: what fits a sheet of A4 or letter; two charts of points do
  const CONFIG = {
    responsive: true, displaylogo: false, scrollZoom: false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]], // on hover
  };
  const parse = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = parse("figures");
  const charts = [];

  // Labels of points. Each gets the place beside its point where it leaves the plot and other labels alone and covers the fewest
  // points and not the front; where there is none, its name is only told on hover.
  const SIDES = [
    ["bottom left", -1, 1], ["top right", 1, -1], ["middle right", 1, 0], ["middle left", -1, 0],
    ["bottom right", 1, 1], ["top left", -1, -1], ["top center", 0, -1], ["bottom center", 0, 1],
  ];
  const canvas = document.createElement("canvas").getContext("2d");
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

  function placeLabels(chart) {
    const at = chart.data.findIndex((trace) => trace.name === "labels");
    if (at < 0) return;
    const { xaxis, yaxis, font } = chart._fullLayout;
    canvas.font = `12px ${font.family}`;
    const place = (x, y) => [xaxis.d2p(x), yaxis.d2p(y)];
    const dots = chart.data.filter((trace) => trace.mode === "markers" && trace.x.length)
      .flatMap((trace) => trace.x.map((x, i) => place(x, trace.y[i])));
    const line = chart.data.find((trace) => trace.mode === "lines");
    const corners = line.x.flatMap((x, i) => { // of the front
      if (i === 0) return [place(x, line.y[0])];
      const turn = line.line.shape === "hv" ? [x, line.y[i - 1]] : [line.x[i - 1], line.y[i]];
      return [place(...turn), place(x, line.y[i])];
    });
    const edges = corners.slice(1).map(([x, y], i) => ({
      left: Math.min(x, corners[i][0]) - 1, right: Math.max(x, corners[i][0]) + 1,
      top: Math.min(y, corners[i][1]) - 1, bottom: Math.max(y, corners[i][1]) + 1,
    }));
    const trace = chart.data[at];
    const taken = [], texts = [], sides = [];
    const mirror = chart.layout.meta.beyond === "right" ? -1 : 1; // the first sides are those beyond the front
    chart.labels = chart.labels || [...trace.text];
    chart.labels.forEach((label, i) => {
      const [x, y] = place(trace.x[i], trace.y[i]);
      const width = canvas.measureText(unescaped(label)).width + 2, height = 15;
      let best = null;
      for (const [name, sideways, dy] of SIDES) {
        const dx = sideways * mirror;
        const side = mirror > 0 ? name : name.replace(/left|right/, (word) => (word === "left" ? "right" : "left"));
        const left = dx > 0 ? x + 6 : dx < 0 ? x - 6 - width : x - width / 2; // where plotly puts it
        const top = dy > 0 ? y + 6 : dy < 0 ? y - 6 - height : y - height / 2;
        const box = { left, top, right: left + width, bottom: top + height };
        if (box.left < 0 || box.right > xaxis._length + 8 || box.top < -8 || box.bottom > yaxis._length + 4) continue;
        if (taken.some((other) => touch(box, other))) continue;
        const crossed = edges.some((edge) => touch(box, edge)) ? 0.5 : 0;
        const covered = crossed + dots.filter(([px, py]) =>
          !(px === x && py === y) && touch(box, { left: px - 5, right: px + 5, top: py - 5, bottom: py + 5 })).length;
        if (best === null || covered < best.covered) best = { side, box, covered };
      }
      if (best !== null && best.covered >= 2) best = null;
      texts.push(best === null ? "" : label);
      sides.push(best === null ? "top right" : best.side);
      if (best !== null) taken.push(best.box);
    });
    Plotly.restyle(chart, { text: [texts], textposition: [sides] }, [at]);
  }

  function unescaped(label) {
    const holder = document.createElement("textarea");
    holder.innerHTML = label;
    return holder.value;
  }

  function draw(chart, figure) {
    const zoomable = figure.data.some((trace) => trace.name === "labels");
    Plotly.newPlot(chart, figure.data, figure.layout, { ...CONFIG, displayModeBar: zoomable ? "hover" : false });
    placeLabels(chart);
    chart.on("plotly_relayout", () => placeLabels(chart));
    charts.push(chart);
  }

  for (const chart of document.querySelectorAll(".chart[data-figure]")) draw(chart, figures[chart.dataset.figure]);

  // Heat maps by layer and head, or by layer and length, of the chosen text, recipe and metric.
  const grid = document.getElementById("profile");
  if (grid !== null) {
    const profiles = parse("profiles");
    const choice = (name) => document.getElementById(`choose-${name}`);
    const fill = (select, values) => {
      const before = select.value;
      select.replaceChildren(...values.map(([value, text]) => new Option(text, value)));
      if (values.some(([value]) => value === before)) select.value = before;
    };
    const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
    const chosen = () => profiles.texts[choice("text").value];
    const update = (first) => {
      fill(choice("recipe"), chosen().recipes.map((each, i) => [String(i), each.recipe]));
      const recipe = chosen().recipes[choice("recipe").value];
      fill(choice("by"), [["heads", "KV head"], ["by_length", "length of context"]].filter(([by]) => Object.keys(recipe[by]).length));
      const by = choice("by").value;
      fill(choice("metric"), Object.keys(recipe[by]).map((each) => [each, profiles.metrics[each] || each]));
      const metric = choice("metric").value;
      const rows = by === "heads" ? recipe[by][metric] : recipe[by][metric][0].map((_, l) => recipe[by][metric].map((row) => row[l]));
      const columns = by === "heads" ? rows[0].map((_, h) => String(h)) : recipe.lengths;
      const scale = profiles.scales[choice("text").value][by][metric]; // the same for all recipes, so that they can be compared
      const word = by === "heads" ? "KV head" : "tokens:";
      const trace = {
        ...scale, type: "heatmap", xgap: 1, ygap: 1, hoverinfo: "text", x: columns.map((_, i) => i),
        z: rows.map((row) => row.map((e) => (e !== null && e > 0 ? Math.log10(e) : null))),
        text: rows.map((row, l) => row.map((e, c) =>
          `<b>${escaped(recipe.recipe)}</b><br>layer ${l}, ${word} ${columns[c]}<br>${e === null ? "not finite" : e.toPrecision(4)}`)),
      };
      const small = { font: { size: 13 }, standoff: 8 };
      const layout = structuredClone(figures.profile.layout);
      Object.assign(layout.xaxis, { tickvals: trace.x, ticktext: columns, title: { ...small, text: by === "heads" ? "KV head" : "length of context, tokens" } });
      Object.assign(layout.yaxis, { title: { ...small, text: "layer" }, dtick: rows.length <= 16 ? 1 : 4 });
      layout.height = Math.max(260, 90 + 14 * rows.length);
      document.getElementById("profile-title").textContent =
        `${recipe.recipe}: ${profiles.metrics[metric] || metric}, by layer and ${by === "heads" ? "KV head" : "length of context"}` +
        (profiles.texts.length > 1 ? ` (${chosen().text})` : "");
      if (first) draw(grid, { data: [trace], layout });
      else Plotly.react(grid, [trace], layout, { ...CONFIG, displayModeBar: false });
    };
    fill(choice("text"), profiles.texts.map((each, i) => [String(i), each.text]));
    choice("text").closest("label").hidden = profiles.texts.length < 2;
    update(true);
    for (const name of ["text", "recipe", "by", "metric"]) choice(name).addEventListener("change", () => update(false));
  }

  // A sheet of paper has another width than the window.
  window.addEventListener("beforeprint", () => {
    for (const chart of charts) {
      const { height } = chart.layout;
      chart.shown = { autosize: true, width: null, height };
      const most = chart.labels ? PRINTED.points : PRINTED.height;
      Plotly.relayout(chart, { autosize: false, width: PRINTED.width, height: Math.min(height, most) });
    }
  });
  window.addEventListener("afterprint", () => {
    for (const chart of charts) Plotly.relayout(chart, chart.shown);
  });
  document.documentElement.dataset.drawn = String(charts.length);
})();
