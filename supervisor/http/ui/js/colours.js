// Each model's colour, the same wherever it is shown. Only models that hold memory, or did so within the charts, have one:
// so no two of them look alike, however many are configured.

import { state } from "./state.js";

const COLOURS = 12; // --hue-0 and so on
const STEP = 5; // neighbours in the row of colours look alike, those so far apart don't
const taken = new Map(); // names of models, their colours

/** The physical model behind a public name. */
export function physical(name) {
  return state.models.get(name) ?? [...state.models.values()].find((model) => model.virtual_models.includes(name));
}

function isShown(name) {
  const model = state.models.get(name);
  return model?.memory.lease_mib != null || Object.keys(state.history?.series ?? {}).some((series) => series.endsWith(`/${name}`));
}

/** The colour that the name itself leads to, so that it mostly stays the same from visit to visit. */
function preferred(name) {
  let sum = 7;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 65521;
  return sum % COLOURS;
}

/** Give every model that needs a colour one, in the order of their names: the next visit finds them the same. */
function assign() {
  const shown = [...state.models.keys()].filter(isShown).sort();
  for (const name of taken.keys()) if (!shown.includes(name)) taken.delete(name);
  for (const name of shown.filter((each) => !taken.has(each))) {
    const used = new Set(taken.values());
    let colour = preferred(name);
    for (let tries = 1; tries < COLOURS && used.has(colour); tries += 1) colour = (colour + STEP) % COLOURS;
    taken.set(name, colour);
  }
}

function colourOf(name) {
  if (!taken.has(name) && isShown(name)) assign();
  return taken.get(name) ?? null;
}

/** The class of a model's colour, under whichever of its names; "" where it has none. */
export function hue(name) {
  const model = physical(name);
  const colour = model ? colourOf(model.name) : null;
  return colour === null ? "" : `hue-${colour}`;
}
