const specifications = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const titles = JSON.parse(document.getElementById("axes").textContent);
const widths = new Map();
function configuration() {
  const ink = getComputedStyle(document.body).color;
  const line = getComputedStyle(document.documentElement).getPropertyValue("--line");
  return { background: "transparent", font: "system-ui, sans-serif", view: { stroke: null },
    scale: { zero: false }, // bars begin at 0 nevertheless
    title: { color: ink, anchor: "start", fontSize: 14 },
    axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line,
      titleFontWeight: 400, labelFontSize: 11, titleFontSize: 12 },
    legend: { labelColor: ink, titleColor: ink, labelFontSize: 12 },
    line: { color: dark.matches ? "#6ea8fe" : "#1f6feb" }, point: { color: dark.matches ? "#6ea8fe" : "#1f6feb" },
    bar: { color: dark.matches ? "#6ea8fe" : "#1f6feb" },
    range: { heatmap: dark.matches ? ["#1c2229", "#1f6feb", "#cfe2ff"] : ["#f6f8fa", "#6ea8fe", "#0a3069"], category: dark.matches
      ? ["#6ea8fe", "#f0a35e", "#56d364", "#d2a8ff", "#ff8a80", "#79dbe8", "#e3b341", "#ff9ecb"]
      : ["#1f6feb", "#c2570c", "#1a7f37", "#8250df", "#b42318", "#0a7b8a", "#8a5a00", "#bf3989"] } };
}
function draw() {
  const axis = document.getElementById("axis")?.value ?? "step";
  specifications.forEach((given, index) => {
    const place = document.getElementById("chart-" + index);
    if (place.closest("details:not([open])")) return;  // it has no width until it is unfolded
    const wanted = structuredClone(given);
    const x = wanted.encoding.x;
    if (x.field === "step") {
      x.field = axis; x.title = titles[axis];
      if (axis !== "step") x.axis = { format: ".3~s" };
    }
    const smoothing = document.getElementById("smoothing")?.value;
    if (smoothing && wanted.layer && smoothing in wanted.data.values[0]) {  // the raw line behind the smoothed one
      const raw = structuredClone(wanted.layer[0]);
      delete raw.params;
      raw.mark.opacity = 0.3;
      wanted.layer[0].encoding.y = { ...wanted.encoding.y, field: smoothing };
      wanted.layer.unshift(raw);
    }
    const legend = wanted.encoding.color?.legend;
    if (legend?.orient === "top") {  // as many beside each other as fit, and the chart higher by the other lines
      const names = new Set(wanted.data.values.map(row => row[wanted.encoding.color.field]));
      const room = place.clientWidth - 24;
      const longest = 34 + 6.5 * Math.max(...[...names].map(name => String(name).length));
      legend.columns = Math.max(1, Math.min(names.size, Math.floor(room / longest)));
      legend.labelLimit = Math.max(60, room / legend.columns - 30);
      wanted.height += 16 * (Math.ceil(names.size / legend.columns) - 1);
    }
    wanted.width = "container"; wanted.autosize = { type: "fit", contains: "padding" };
    vegaEmbed(place, wanted, { actions: false, renderer: "svg", config: configuration(), ast: false });
  });
}
document.getElementById("axis")?.addEventListener("change", draw);
document.getElementById("smoothing")?.addEventListener("change", draw);
for (const folded of document.querySelectorAll("details:has(.chart)")) folded.addEventListener("toggle", draw);
dark.addEventListener("change", draw);
draw();
