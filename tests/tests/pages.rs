// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pages of this repository, those that git knows where it has a history:
//! - each relative link leads to a file, and one with `#` to a heading of a page
//! - all but the changelog have at most 16,000 words, without the tables that `make figures` writes

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const WORDS: usize = 16_000;

#[test]
fn each_link_leads_somewhere() {
    let mut checked = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for link in links(&text) {
            let why = dead(&page, &text, link);
            assert_eq!(why, None, "{}: {link}", page.display());
            checked += 1;
        }
    }
    assert!(checked >= 150, "{checked} links");
}

#[test]
fn pages_are_short() {
    let pages = pages();
    let counted = pages.iter().filter(|page| !page.ends_with("CHANGELOG.md"));
    let words = counted.map(|page| words(&fs::read_to_string(page).expect("a page")));
    let words: usize = words.sum();
    assert!(words <= WORDS, "{words} words");
}

#[test]
fn dead_links_are_found() {
    let text = "# The `exit` path, again\n```\n# no heading\n```\n\
                [a](other.md) `[no](link)`\n[b](#the-exit-path-again) [c](https://example.com)";
    assert_eq!(links(text), ["other.md", "#the-exit-path-again"]);
    let page = root().join("README.md");
    let is_dead = |link| dead(&page, text, link).is_some();
    assert!(is_dead("docs/nowhere.md") && is_dead("#no-heading"));
    assert!(is_dead("docs/design.md#nowhere"));
    assert!(!is_dead("#the-exit-path-again") && !is_dead("docs/design.md#arithmetic"));
}

#[test]
fn words_of_generated_tables_do_not_count() {
    let text = "one two\n<!-- figures:x -->\n| a | b |\n<!-- end -->\n| three | - |\n";
    assert_eq!(words(text), 3);
    let text = "<!-- made by x -->\nfour five:\n\n| a | b |\n## six\n| seven |\n";
    assert_eq!(words(text), 7);
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Without someone's notes beside the sources, unless there is no git to ask.
fn pages() -> Vec<PathBuf> {
    known_to_git().unwrap_or_else(|| pages_below(&root()))
}

fn known_to_git() -> Option<Vec<PathBuf>> {
    // Not that of a folder above, which may know none of these.
    if !root().join(".git").exists() {
        return None;
    }
    let mut git = Command::new("git");
    let listed = git.current_dir(root()).args(["ls-files", "-z", "*.md"]);
    let output = listed.output().ok()?;
    let names = String::from_utf8(output.stdout).ok()?;
    let paths = names.split_terminator('\0').map(|name| root().join(name));
    // A removed page is listed until that is committed.
    output
        .status
        .success()
        .then(|| paths.filter(|path| path.exists()).collect())
}

/// All pages below a folder, but for what is built or hidden.
fn pages_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let entry = entry.expect("an entry");
        let path = entry.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.expect("UTF-8");
        // Not a link to one: its pages would count twice.
        if entry.file_type().expect("a type").is_dir() {
            if !name.starts_with('.') && !["target", "out"].contains(&name) {
                found.extend(pages_below(&path));
            }
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
    found
}

fn words(text: &str) -> usize {
    let text = without_tables_of_code(text);
    let mut parts = text.split("<!-- figures:");
    let first = parts.next().unwrap_or_default();
    let after = parts.filter_map(|part| Some(part.split_once("<!-- end -->")?.1));
    let texts = std::iter::once(first).chain(after);
    // The bars of a table are no words.
    let words = texts.flat_map(str::split_whitespace);
    words
        .filter(|word| word.contains(char::is_alphanumeric))
        .count()
}

/// A page without the tables that code makes, from its `made by` to the next heading.
fn without_tables_of_code(text: &str) -> String {
    let mut made = false;
    let lines = text.split_inclusive('\n').filter(|line| {
        made = (made || line.starts_with("<!-- made by ")) && !line.starts_with('#');
        !(made && line.starts_with('|'))
    });
    lines.collect()
}

/// A page without its blocks of code.
fn prose(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// The targets of a page's links, but for those elsewhere.
fn links(text: &str) -> Vec<&str> {
    let without_code = text.split("```").step_by(2);
    let links = without_code.flat_map(|text| {
        let spans: Vec<&str> = text.split('`').collect();
        // A link whose text is code is cut there, but its target isn't.
        spans.into_iter().step_by(2).flat_map(|part| {
            let targets = part.split("](").skip(1);
            targets.filter_map(|rest| Some(rest.split_once(')')?.0))
        })
    });
    links.filter(|link| !link.contains(':')).collect()
}

/// Why a link of a page with this text leads nowhere.
fn dead(page: &Path, text: &str, link: &str) -> Option<&'static str> {
    let (file, heading) = match link.split_once('#') {
        Some((file, heading)) => (file, Some(heading)),
        None => (link, None),
    };
    let target = page.with_file_name(file);
    if !file.is_empty() && !target.exists() {
        return Some("no such file");
    }
    let heading = heading?;
    let text = match file {
        "" => text.to_owned(),
        _ => fs::read_to_string(&target).ok()?,
    };
    let has = prose(&text).lines().any(|line| {
        let name = line.trim_start_matches('#');
        name.len() < line.len() && anchor(name.trim()) == heading
    });
    (!has).then_some("no such heading")
}

/// The anchor of a heading, as GitHub and mdBook make it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        _ => c.is_alphanumeric().then(|| c.to_ascii_lowercase()),
    });
    kept.collect()
}
