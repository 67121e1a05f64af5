// A widget lives in a kernel. A notebook that is opened on the next day has its picture (or text)
// beside it in the same output, but JupyterLab shows "Loading widget..." and then "Error displaying
// widget: model not found" in their place. This shows the picture, until the widget is there.
// And a picture is drawn for white paper: in a dark theme it is turned. Its caption is its alt text.
// JupyterLab loads this file as it is: it is written as a module that others build.
"use strict";
(window._JUPYTERLAB ??= {})["tutorial-engine-still"] = {
  init(shared) {
    this.shared = shared;
  },
  async get() {
    const [rendermime] = Object.values(this.shared["@jupyterlab/rendermime"]);
    const { IRenderMimeRegistry } = (await rendermime.get())();
    const plugin = { id: "tutorial-engine-still:plugin", autoStart: true, requires: [IRenderMimeRegistry], activate };
    return () => ({ __esModule: true, default: plugin });
  },
};

const WIDGET = "application/vnd.jupyter.widget-view+json";
const PNG = "image/png";
const HINT = "As it was when this cell ran. Run the cell to use it again.";

// Light becomes dark, and a colour keeps its hue. What shows a magnitude keeps its colour, too: the
// most is the brightest. A stored picture with magnitudes says where they are: there it shows once
// more, as it is, over the turned one.
const DARK = '[data-jp-theme-light="false"]';
const SHADED = ":is(.te-cell, .te-shade)";
const CSS = `
  .te-sheet { display: inline-block; position: relative; max-width: 100% }
  .te-keep { display: none; position: absolute; inset: 0; width: 100%; height: 100% }
  ${DARK} .te-keep { display: block }
  ${DARK} .te-turns, ${DARK} .jp-OutputArea details img[src^="data:${PNG}"]:not(.te-shaded),
  ${DARK} svg.te-scene:not(:has(${SHADED})),
  ${DARK} svg.te-scene:has(${SHADED}) :is(.te-scene > *, .te-hot > *):not(.te-hot, ${SHADED}) {
    filter: invert(.93) hue-rotate(180deg)
  }
  ${DARK} svg.te-scene .te-cell { stroke: #121212 }`;

function activate(app, registry) {
  const style = document.createElement("style");
  style.textContent = CSS;
  document.head.append(style);
  const kind = Object.getPrototypeOf(registry);  // of every notebook's own registry, too
  const create = kind.createRenderer;
  kind.createRenderer = function (mimeType) {
    const renderer = create.call(this, mimeType);
    if (mimeType === WIDGET) keepStill(this, renderer);
    if (mimeType === PNG) drawForNight(renderer);
    return renderer;
  };
}

function drawForNight(renderer) {
  const render = renderer.renderModel;
  renderer.renderModel = async function (model) {
    await render.call(this, model);
    const { alt, keep } = model.metadata[PNG] ?? {};
    const image = renderer.node.querySelector("img");
    if (alt === undefined || !image) return;  // not one of ours
    image.alt = alt;
    image.classList.add("te-turns");
    if (!keep) return;
    const sheet = document.createElement("span"), over = image.cloneNode();
    sheet.className = "te-sheet";
    over.className = "te-keep";
    over.alt = "";
    over.style.maskImage = over.style.webkitMaskImage = `url(data:${PNG};base64,${keep})`;
    over.style.maskSize = over.style.webkitMaskSize = "100% 100%";
    image.replaceWith(sheet);
    sheet.append(image, over);
  };
}

function keepStill(registry, renderer) {
  const render = renderer.renderModel;
  let other, shown;  // the kind of picture or text in the output, and the output
  const observer = new MutationObserver(() => other && show(registry, renderer, other, shown));
  observer.observe(renderer.node, { childList: true });
  renderer.renderModel = function (model) {  // again when the kernel has said which widgets it has
    const { [WIDGET]: _, ...rest } = model.data;
    other = registry.preferredMimeType(rest, model.trusted ? "any" : "ensure");
    shown = model;
    return render.call(this, model);
  };
}

// What the widget's own renderer says without a widget is plain text: then the picture comes there.
// It goes by itself when the widget comes: that empties the node.
async function show(registry, renderer, mimeType, model) {
  const said = renderer.node.textContent;
  if (!said || renderer.node.childElementCount) return;
  const still = registry.createRenderer(mimeType);
  await still.renderModel(model);
  if (renderer.node.childElementCount || renderer.node.textContent !== said) return;
  still.addClass("jp-OutputArea-output");
  const nodes = [still.node];
  if (said.startsWith("Error")) {
    const hint = document.createElement("div");
    hint.textContent = HINT;
    hint.style.cssText = "font-size:var(--jp-ui-font-size1);color:var(--jp-ui-font-color2);padding:2px 0 6px";
    nodes.push(hint);
  }
  renderer.node.replaceChildren(...nodes);
}
