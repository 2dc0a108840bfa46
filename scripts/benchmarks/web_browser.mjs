// The pages of `homelab web` in Chromium: node web_browser.mjs CHROMIUM AXE ADDRESS PATH... prints one JSON object a line.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [, , chromium, packages, address, ...paths] = process.argv;
const require = createRequire(`${packages}/`);
const { chromium: browserType } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await browserType.launch({ executablePath: chromium, args: quiet });
const own = new URL(address);

for (const width of [390, 800, 1600]) {
  for (const scheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
    const page = await context.newPage();
    const errors = [], elsewhere = [];
    page.on("console", message => ["error", "warning"].includes(message.type()) && errors.push(message.text()));
    page.on("pageerror", error => errors.push(String(error)));
    page.on("request", request => { const to = new URL(request.url()); if (to.protocol !== "data:" && to.host !== own.host) elsewhere.push(request.url()); });
    await page.goto(address);
    for (const path of paths) {
      const began = performance.now();
      await page.goto(own.origin + path);
      // The curves of a run, or the list of all: then there is something to see.
      await page.waitForSelector(path === "/" ? ".runs li" : ".plot path", { timeout: 120000 });
      const shown_s = (performance.now() - began) / 1000;
      await page.waitForTimeout(2500);
      const facts = await page.evaluate(() => ({
        answer: document.getElementById("answer").textContent,
        is_too_wide: document.documentElement.scrollWidth > innerWidth,
        hit: "hit" in window || document.querySelectorAll("main img").length > 0,
        hostile_texts: [...document.querySelectorAll("main *")].filter(node => !node.children.length && node.textContent.includes("onerror=")).length,
        nodes: document.querySelectorAll("*").length,
      }));
      if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/${path.split("/").pop() || "all"}-${width}-${scheme}.png`, fullPage: true });
      const session = await context.newCDPSession(page);
      await session.send("Page.setBypassCSP", { enabled: true }); // for axe alone, after the page has been judged
      await page.evaluate(axe);
      const found = (await page.evaluate(() => window.axe.run())).violations.map(one => ({ id: one.id, impact: one.impact, where: one.nodes.slice(0, 3).map(node => node.target.join(" ")) }));
      console.log(JSON.stringify({ path, width, scheme, shown_s, errors: errors.splice(0), elsewhere: elsewhere.splice(0), axe: found, ...facts }));
    }
    await context.close();
  }
}
await browser.close();
