// Where the page is: the parts of the address after "#".

export function parts() {
  return location.hash
    .replace(/^#\/?/, "")
    .split("/")
    .map(decoded);
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone "%": typed by hand
  }
}

export function href(...path) {
  return `#/${path.map(encodeURIComponent).join("/")}`;
}

export function go(...path) {
  location.hash = href(...path);
}
