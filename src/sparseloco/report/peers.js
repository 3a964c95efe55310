// Takes the newest view in place, so that nothing jumps; a page opened as a file is loaded anew.
const every = Number(document.body.dataset.every) * 1000;
async function renew() {
  if (location.protocol === "file:") return location.reload();
  try {
    const answer = await fetch(location.pathname, { cache: "no-store" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = page.querySelector("main");
    if (!answer.ok || !main) throw new Error(answer.statusText);
    document.querySelector("main").replaceWith(document.adoptNode(main));
    document.title = page.title;
  } catch (error) {
    document.title = "not reached: " + document.title.replace(/^not reached: /, "");
  }
}
if (every > 0) setInterval(renew, every);
