// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What all pictures of the pages have in common: SVG, written by hand, once for a page and once for a
//! phone, so that its letters are as large on both; a scale with its marks; and strokes that differ
//! without colour. `plotters` would cost 16 packages and 3.7 times a page's size.

use std::fmt::Write as _;

/// A picture's class in the style sheet, which shows one of them, and its width in the SVG's own units:
/// about as many pixels.
const WIDTHS: [(&str, f64); 2] = [("page", 900.0), ("phone", 360.0)];
/// Of a letter in text of 12 units, at most.
pub const LETTER: f64 = 7.0;
/// Between two marks of a scale: a label and some space.
const MARK_SPACE: f64 = 64.0;
/// A label in the middle of a mark reaches so far beyond it.
pub const MARGIN: f64 = 26.0;

/// A colour, dashes and a width.
#[derive(Debug, Clone, Copy)]
pub struct Stroke {
    /// Dark enough for white paper.
    pub colour: &'static str,
    /// As `stroke-dasharray`.
    pub dashes: &'static str,
    /// Of the line.
    pub width: f64,
}

impl Stroke {
    /// As attributes of a line or a path.
    pub fn attributes(self) -> String {
        let Self {
            colour,
            dashes,
            width,
        } = self;
        format!(
            "fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\""
        )
    }
}

/// From the least to the most of some values, with the middle one.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// The least.
    pub least: f64,
    /// The median.
    pub median: f64,
    /// The most.
    pub most: f64,
}

/// Where a text is put on.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

/// A picture that is being drawn.
#[derive(Debug)]
pub struct Drawing {
    /// In its own units.
    pub width: f64,
    text: String,
}

/// A picture, drawn for each width. `draw` gives its height; `label` is for those that do not see it.
pub fn pictures(label: &str, draw: impl Fn(&mut Drawing) -> f64) -> String {
    let mut html = "<div class=\"chart\">\n".to_owned();
    for (class, width) in WIDTHS {
        let mut picture = Drawing {
            width,
            text: String::new(),
        };
        let height = draw(&mut picture);
        let _ = write!(
            html,
            "<svg class=\"{class}\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n",
            escaped(label),
            picture.text
        );
    }
    html + "</div>\n"
}

impl Drawing {
    /// Adds an element.
    pub fn add(&mut self, element: &str) {
        self.text.push_str(element);
        self.text.push('\n');
    }

    /// Adds a straight line.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), attributes: &str) {
        self.add(&format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {attributes}/>"
        ));
    }

    /// Adds a line for a spread, with a bar at the median, at this height.
    pub fn spread(&mut self, scale: Scale, spread: Spread, y: f64) {
        let [least, median, most] =
            [spread.least, spread.median, spread.most].map(|of| scale.x(of));
        self.line(
            (least, y),
            (most, y),
            "stroke=\"#444\" stroke-width=\"1.5\"",
        );
        for end in [least, most] {
            self.line(
                (end, y - 4.0),
                (end, y + 4.0),
                "stroke=\"#444\" stroke-width=\"1.5\"",
            );
        }
        self.line(
            (median, y - 8.0),
            (median, y + 8.0),
            "stroke=\"#000\" stroke-width=\"4\"",
        );
    }

    /// Adds a text.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escaped(text);
        self.add(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        ));
    }
}

/// Where values lie from left to right.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// The values at both ends.
    pub values: (f64, f64),
    /// And where those are.
    pub ends: (f64, f64),
}

impl Scale {
    /// Where a value is; one beyond an end is at that.
    pub fn x(&self, value: f64) -> f64 {
        let ((from, to), (left, right)) = (self.values, self.ends);
        (left + (value - from) / (to - from) * (right - left)).clamp(left, right)
    }

    /// Draws marks from `top` to `bottom`, and their labels below: each in `unit`, of which a value has
    /// `per`.
    pub fn marks(
        &self,
        picture: &mut Drawing,
        (top, bottom): (f64, f64),
        (unit, per): (&str, f64),
    ) {
        let room = ((self.ends.1 - self.ends.0) / MARK_SPACE).max(1.0);
        let span = (self.values.1 - self.values.0) / per;
        let (step, digits) = step(span, room);
        // Not -0.
        let mut number = (self.values.0 / per / step).ceil() * step + 0.0;
        while number * per <= self.values.1 {
            let x = self.x(number * per);
            picture.line((x, top), (x, bottom), "class=\"axis\"");
            let label = format!("{number:.digits$} {unit}");
            picture.text((x, bottom + 17.0), Anchor::Middle, &label);
            number += step;
        }
    }
}

/// The least of 1, 2, 5, 10 and so on, or a tenth of one, by which a span has at most so many steps,
/// and its digits behind the point. A span too short for tenths takes hundredths, and so on, so that it
/// has a mark.
fn step(span: f64, most: f64) -> (f64, usize) {
    let (mut unit, mut digits) = (0.1, 1);
    while span < 2.0 * unit && digits < 6 {
        (unit, digits) = (unit / 10.0, digits + 1);
    }
    loop {
        for step in [unit, 2.0 * unit, 5.0 * unit] {
            if span / step <= most {
                return (step, digits);
            }
        }
        (unit, digits) = (unit * 10.0, digits.saturating_sub(1));
    }
}

/// Text for HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    //! A picture is there for a page and for a phone; marks are as dense as their labels allow, and
    //! none of those is cut off.

    use super::*;

    #[test]
    fn a_picture_is_there_for_a_page_and_a_phone() {
        let html = pictures("a < b", |picture| {
            let right = picture.width;
            picture.line((0.0, 1.0), (right, 1.0), "");
            40.0
        });
        assert_eq!(html.matches("aria-label=\"a &lt; b\"").count(), 2);
        for part in [
            "viewBox=\"0 0 900 40\"",
            "viewBox=\"0 0 360 40\"",
            "x2=\"360.0\"",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
    }

    #[test]
    fn labels_of_a_scale_have_room() {
        for (width, from, to) in [
            (360.0, 0.0, 111_300.0),
            (360.0, 110_200.0, 110_900.0),
            (900.0, -50_000.0, 2_000_000.0),
            (360.0, 0.0, 800.0),
            // Draws that are all 550 us.
            (360.0, 528.0, 551.1),
            (900.0, 528.0, 551.1),
            (360.0, 0.0, 200.0),
            (360.0, 0.0, 199.0),
        ] {
            let scale = Scale {
                values: (from, to),
                ends: (MARGIN, width - MARGIN),
            };
            let mut picture = Drawing {
                width,
                text: String::new(),
            };
            scale.marks(&mut picture, (0.0, 10.0), ("ms", 1e3));
            let of = |line: &str| -> Option<(f64, f64)> {
                let rest = line.strip_prefix("<text x=\"")?;
                let (x, rest) = rest.split_once('"')?;
                let label = rest.split_once('>')?.1.split_once('<')?.0;
                let half = f64::from(u32::try_from(label.len()).ok()?) * LETTER / 2.0;
                Some((x.parse().ok()?, half))
            };
            let labels: Vec<_> = picture.text.lines().filter_map(of).collect();
            assert!(labels.len() > 1, "{width} {to}: {}", picture.text);
            for pair in labels.windows(2) {
                let apart = pair[1].0 - pair[0].0;
                assert!(apart >= pair[0].1 + pair[1].1, "{width} {to}: {labels:?}");
            }
        }
    }
}
