// Render the page. Charts in a closed section are rendered when it is opened.
for (const figure of document.querySelectorAll(".chart")) if (!figure.closest("details.further")) drawChart(figure);
for (const further of document.querySelectorAll("details.further")) {
  further.addEventListener("toggle", () => { for (const figure of further.querySelectorAll(".chart")) drawChart(figure); }, { once: true });
}
for (const figure of document.querySelectorAll(".stages")) drawStages(figure);
for (const figure of document.querySelectorAll(".waits")) drawWaits(figure);
const browser = document.getElementById("browser");
if (browser) drawBrowser(browser);
document.documentElement.dataset.ready = String(document.querySelectorAll(".plot svg").length);
