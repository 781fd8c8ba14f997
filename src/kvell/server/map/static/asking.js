// Asks the server.  The key is in this variable and nowhere else.

let key = null;

// The path is relative to the page: a proxy may have this server under a path of its own.
async function ask(path) {
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const answer = await fetch(path, { headers, cache: "no-store", credentials: "omit" });
  if (answer.status === 401 || answer.status === 403) {
    byId("access").hidden = false;
    throw new Error(key === null ? "an API key is needed" : "this key is not accepted");
  }
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}
