// Writes what the page "Connect" offers as JSON: the module of the page, and what it is given as the second word.

const [, , module, given] = process.argv;
const { snippets } = await import(module);
process.stdout.write(JSON.stringify(snippets(JSON.parse(given))));
