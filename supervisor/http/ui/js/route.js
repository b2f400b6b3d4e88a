// Where the page is: the parts of the address after "#".

export function parts() {
  return location.hash
    .replace(/^#\/?/, "")
    .split("/")
    .map(decodeURIComponent);
}

export function href(...path) {
  return `#/${path.map(encodeURIComponent).join("/")}`;
}

export function go(...path) {
  location.hash = href(...path);
}
