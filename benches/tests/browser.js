// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// What a person would stumble over in the pages of this page's frames, a line each. Run once all are
// loaded.
"use strict";

function overlap(a, b) {
	return a.left < b.right && b.left < a.right && a.top + 2 < b.bottom - 2 && b.top + 2 < a.bottom - 2;
}

function inPicture(svg, say) {
	const frame = svg.getBoundingClientRect();
	const texts = [...svg.querySelectorAll("text")];
	const boxes = texts.map((text) => text.getBoundingClientRect());
	boxes.forEach((box, at) => {
		const text = texts[at].textContent;
		if (box.left < frame.left || box.right > frame.right || box.bottom > frame.bottom + 1)
			say(`cut off: ${text}`);
		// A line box of 12 pixels' letters; of some fonts less.
		if (box.height < 11)
			say(`small: ${text}`);
		const other = boxes.findIndex((one, index) => index > at && overlap(box, one));
		if (other > 0)
			say(`${text} is on ${texts[other].textContent}`);
	});
	const looks = new Map();
	for (const line of svg.querySelectorAll("[stroke-dasharray]")) {
		const colour = line.getAttribute("stroke");
		const look = `${line.getAttribute("stroke-dasharray")}, ${line.getAttribute("stroke-width")} wide`;
		if (looks.has(look) && looks.get(look) !== colour)
			say(`lines differ in nothing but colour: ${look}`);
		looks.set(look, colour);
	}
	return texts.length;
}

function inPage(page, say) {
	page.querySelectorAll("details").forEach((part) => { part.open = true; });
	if (page.documentElement.scrollWidth > page.documentElement.clientWidth)
		say("the page is too wide");
	for (const part of page.querySelectorAll(".wide"))
		if (part.scrollWidth > part.clientWidth)
			say(`too wide by ${part.scrollWidth - part.clientWidth}: ${part.innerText.slice(0, 60)}`);
	const shown = [...page.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
	return shown.reduce((sum, svg) => sum + inPicture(svg, say), 0);
}

addEventListener("load", () => {
	const found = [];
	for (const frame of document.querySelectorAll("iframe")) {
		const name = `${frame.title}, ${frame.width} pixels`;
		const texts = inPage(frame.contentDocument, (what) => found.push(`${name}: ${what}`));
		if (texts === 0)
			found.push(`${name}: no text in a picture`);
	}
	const said = document.createElement("pre");
	said.textContent = `looked\n${found.join("\n")}\nend`;
	document.body.append(said);
});
