// The pages of `homelab web` in Chromium: node web_browser.mjs CHROMIUM AXE ADDRESS PATH... prints one JSON object a line.
// On a path that ends with #chat a conversation is held by the keyboard alone, and judged in the middle of it. On one with #ask the dialog of a command
// is judged while it asks, on one with #act when the command, which finds no node, has ended.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [, , chromium, packages, address, ...paths] = process.argv;
const require = createRequire(`${packages}/`);
const { chromium: browserType } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await browserType.launch({ executablePath: chromium, args: quiet });
const own = new URL(address);

// Begins a conversation, asks, stops the answer, begins anew, asks again; what was not as it should be. The model's words never end by themselves.
async function chat(page) {
  const wrong = [], began = performance.now();
  const focus = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent);
  const seen = (selector, text) => page.locator(selector, { hasText: text }).last().waitFor({ timeout: 30000 });
  await page.getByRole("button", { name: "Begin a conversation" }).focus();
  await page.keyboard.press("Enter");
  await seen("#chat-talk .note", "it needs about");
  if (await focus() !== "Cancel") wrong.push(`while it loads, the focus is on ${await focus()}`);
  await seen("#chat-talk .note", "has loaded the model");
  if (await focus() !== "chat-question") wrong.push(`when it is loaded, the focus is on ${await focus()}`);
  const loaded_s = (performance.now() - began) / 1000;
  await page.keyboard.type("first line");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("<img src=x onerror=window.hit=2>");
  await page.getByLabel("at most").fill("4000");
  await page.getByLabel("Your question").focus();
  const asked = performance.now();
  await page.keyboard.press("Enter");
  await seen("#chat-talk .words", "it says");
  const first_word_s = (performance.now() - asked) / 1000;
  if (await page.locator("#chat-talk .asked").innerText() !== "first line\n<img src=x onerror=window.hit=2>") wrong.push("the question has lost its lines");
  await page.getByRole("button", { name: "Stop" }).focus();
  await page.keyboard.press("Enter");
  await seen("#chat-talk .note", "stopped");
  if (await focus() !== "chat-question") wrong.push(`after Stop, the focus is on ${await focus()}`);
  await page.keyboard.type("/clear");
  await page.keyboard.press("Enter");
  await seen("#chat-talk .note", "has forgotten");
  if (await page.locator("#chat-talk .words").count()) wrong.push("a new conversation shows the old one");
  await page.keyboard.type("once more");
  await page.keyboard.press("Enter");
  await seen("#chat-talk .words:not(.asked)", "onerror");
  return { loaded_s, first_word_s, wrong };
}

// Opens the dialog, leaves it by Escape, opens it again, and begins the command if `does_act`; all by the keyboard.
async function act(page, does_act) {
  const wrong = [], focus = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent);
  const opener = page.getByRole("button", { name: "Recover…" }), dialog = page.locator("#act");
  await opener.focus();
  for (const isLast of [false, true]) {
    await page.keyboard.press("Enter");
    await dialog.waitFor({ timeout: 5000 });
    if (await focus() !== "act-cancel") wrong.push(`in the dialog, the focus is on ${await focus()}`);
    if (!await page.getByRole("dialog", { name: "Recover this run?" }).count()) wrong.push("the dialog has another name");
    const said = await page.evaluate(() => document.getElementById(document.getElementById("act").getAttribute("aria-describedby")).textContent);
    if (!said.startsWith("The run goes on from")) wrong.push(`the dialog says ${said}`);
    if (!(await dialog.locator("code").innerText()).startsWith("homelab recover")) wrong.push("the dialog shows no command");
    if (isLast) break;
    await page.keyboard.press("Tab");
    await page.keyboard.press("Escape");
    await dialog.waitFor({ state: "hidden", timeout: 5000 });
    if (await focus() !== "Recover…") wrong.push(`after Escape, the focus is on ${await focus()}`);
  }
  if (!does_act) return { wrong };
  await page.keyboard.press("Tab");
  if (await focus() !== "act-begin") wrong.push(`behind Cancel, the focus is on ${await focus()}`);
  const began = performance.now();
  await page.keyboard.press("Enter");
  if (await focus() !== "act-cancel") wrong.push(`while it acts, the focus is on ${await focus()}`);
  await dialog.locator(".told.trouble", { hasText: "fix: " }).waitFor({ timeout: 60000 });
  return { wrong, told_s: (performance.now() - began) / 1000, told: await dialog.locator(".told").innerText() };
}

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
      const talk = path.endsWith("#chat") ? await chat(page) : /#(ask|act)$/.test(path) ? await act(page, path.endsWith("#act")) : {};
      const facts = await page.evaluate(() => ({
        answer: document.getElementById("answer").textContent,
        is_too_wide: document.documentElement.scrollWidth > innerWidth,
        hit: "hit" in window || document.querySelectorAll("main img").length > 0,
        hostile_texts: [...document.querySelectorAll("main *")].filter(node => !node.children.length && node.textContent.includes("onerror=")).length,
        nodes: document.querySelectorAll("*").length,
      }));
      if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/${path.split("/").pop().replace("#", "-") || "all"}-${width}-${scheme}.png`, fullPage: !/#(ask|act)$/.test(path) });
      const session = await context.newCDPSession(page);
      await session.send("Page.setBypassCSP", { enabled: true }); // for axe alone, after the page has been judged
      await page.evaluate(axe);
      const found = (await page.evaluate(() => window.axe.run())).violations.map(one => ({ id: one.id, impact: one.impact, where: one.nodes.slice(0, 3).map(node => node.target.join(" ")) }));
      console.log(JSON.stringify({ path, width, scheme, shown_s, errors: errors.splice(0), elsewhere: elsewhere.splice(0), axe: found, ...facts, ...talk }));
      if (path.includes("#")) await page.goto("about:blank"); // the page leaves in the middle of an answer, or with its dialog open
    }
    await context.close();
  }
}
await browser.close();
