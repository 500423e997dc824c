// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! docs/architecture.svg, held to what it draws. Its elements are read by where they are, as a reader
//! sees them: a name is of the box around it, an arrow leads from the box where it begins to the box
//! where it ends.
//! - a box for each crate, and a thick one for each that is published
//! - an arrow from crate to crate where Cargo.toml has one, but for those that others imply
//! - the paths of `--path`, and the classes of the VMM's threads

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

#[path = "layout/metadata.rs"]
mod metadata;

use metadata::{name, packages};

#[test]
fn each_crate_has_a_box() {
    let picture = picture();
    let drawn: BTreeSet<String> = picture.crates().map(|(name, _)| name).collect();
    let packages = packages();
    let names = packages.iter().filter_map(name).map(str::to_owned);
    assert_eq!(drawn, names.collect());
    let thick = picture.crates().filter(|(_, of)| of.has_class("published"));
    let published = packages.iter().filter(|one| one["publish"].is_null());
    let published = published.filter_map(name).map(str::to_owned);
    assert_eq!(
        thick.map(|(name, _)| name).collect::<BTreeSet<_>>(),
        published.collect()
    );
}

#[test]
fn each_arrow_is_a_dependency() {
    let picture = picture();
    let crates: Vec<(String, Element)> = picture.crates().collect();
    let at = |x, y| {
        let found = crates.iter().find(|(_, of)| of.holds(x, y));
        let (name, _) = found.unwrap_or_else(|| panic!("no crate's box at {x} {y}"));
        name.clone()
    };
    let arrows = picture.of_class("path", "uses");
    // `M72 784V884`: straight down.
    let arrows = arrows.map(|arrow| {
        let ends = arrow.attribute("d").trim_start_matches('M');
        let (from, to) = ends.split_once('V').expect("a line down");
        let (x, y) = from.split_once(' ').expect("a point");
        let number = |text: &str| text.parse::<u32>().expect("a number");
        (at(number(x), number(y)), at(number(x), number(to)))
    });
    let tests = |of: &str| {
        let (_, drawn) = crates.iter().find(|(name, _)| name == of).expect(of);
        drawn.has_class("test")
    };
    let needed = needed(&packages());
    let direct = needed.iter().flat_map(|(of, on)| {
        let implied = |other: &&String| on.iter().any(|through| needed[through].contains(*other));
        let on = on.iter().filter(move |other| !implied(other));
        on.map(|on| (of.clone(), on.clone()))
    });
    let direct = direct.filter(|(of, _)| !tests(of));
    assert_eq!(arrows.collect::<BTreeSet<_>>(), direct.collect());
}

#[test]
fn each_path_and_thread_is_there() {
    let picture = picture();
    let texts = |class| -> BTreeSet<String> {
        let found = picture.of_class("text", class);
        found.map(|one| one.content.clone()).collect()
    };
    assert_eq!(texts("path"), variants("vmm/src/path.rs", "Path"));
    let threads = variants("vmm/src/sandbox/thread_class.rs", "ThreadClass");
    assert_eq!(texts("thread"), threads);
}

/// Each crate, and all of this workspace that it is compiled with.
fn needed(packages: &[Value]) -> BTreeMap<String, BTreeSet<String>> {
    let mut needed: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let names: BTreeSet<&str> = packages.iter().filter_map(name).collect();
    for package in packages {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        // Those of tests and build scripts have a kind.
        let used = dependencies.iter().filter(|one| one["kind"].is_null());
        let used = used.filter_map(name).filter(|used| names.contains(used));
        let of = name(package).expect("a name").to_owned();
        needed.insert(of, used.map(str::to_owned).collect());
    }
    loop {
        let before = needed.clone();
        for on in needed.values_mut() {
            let further: Vec<_> = on.iter().flat_map(|one| &before[one]).cloned().collect();
            on.extend(further);
        }
        if needed == before {
            return needed;
        }
    }
}

/// The variants of an enum, in lower case.
fn variants(file: &str, of: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join(file)).expect(file);
    let items = syn::parse_file(&text).expect("Rust").items;
    let found = items.into_iter().find_map(|item| match item {
        syn::Item::Enum(item) if item.ident == of => Some(item.variants),
        _ => None,
    });
    let found = found.unwrap_or_else(|| panic!("{file} has no {of}"));
    let names = found.iter().map(|one| one.ident.to_string());
    names.map(|name| name.to_lowercase()).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn picture() -> Picture {
    let text = fs::read_to_string(root().join("docs/architecture.svg")).expect("the picture");
    let body = text.split_once("</defs>").expect("definitions").1;
    let lines = body.lines().filter(|line| line.starts_with('<'));
    Picture(lines.map(Element::read).collect())
}

/// The picture's elements, one a line.
struct Picture(Vec<Element>);

impl Picture {
    fn of_class<'a>(&'a self, tag: &'a str, class: &'a str) -> impl Iterator<Item = &'a Element> {
        let of_tag = self.0.iter().filter(move |one| one.tag == tag);
        of_tag.filter(move |one| one.has_class(class))
    }

    /// Each crate's name, and its box.
    fn crates(&self) -> impl Iterator<Item = (String, Element)> {
        self.of_class("rect", "crate").map(|of| {
            let names = self.of_class("text", "name");
            let mut inside = names.filter(|name| of.holds(name.number("x"), name.number("y")));
            let name = inside.next().expect("a crate's name");
            (name.content.clone(), of.clone())
        })
    }
}

/// `<TAG NAME="VALUE" ...>CONTENT</TAG>`.
#[derive(Clone)]
struct Element {
    tag: String,
    attributes: BTreeMap<String, String>,
    content: String,
}

impl Element {
    fn read(line: &str) -> Self {
        let (opening, rest) = line[1..].split_once('>').unwrap_or((line, ""));
        let (tag, attributes) = opening.split_once(' ').unwrap_or((opening, ""));
        let mut parts = attributes.split('"');
        let mut pairs = BTreeMap::new();
        while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
            let name = name.trim().trim_end_matches('=');
            pairs.insert(name.to_owned(), value.to_owned());
        }
        let content = rest.split('<').next().unwrap_or_default();
        Self {
            tag: tag.to_owned(),
            attributes: pairs,
            content: content.to_owned(),
        }
    }

    fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> u32 {
        self.attribute(name).parse().expect(name)
    }

    fn has_class(&self, class: &str) -> bool {
        self.attribute("class").split(' ').any(|one| one == class)
    }

    /// Whether a point is in this rectangle, or on its edge.
    fn holds(&self, x: u32, y: u32) -> bool {
        let within = |at, from, size| {
            (self.number(from)..=self.number(from) + self.number(size)).contains(&at)
        };
        within(x, "x", "width") && within(y, "y", "height")
    }
}
