// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How big the house is: figures of the sources that may fall and not rise, and lines, which are
//! printed alone, since a capability needs some. `cargo test --test shape -- --nocapture` prints all.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A source file, without its tests.
struct Source {
    /// From the repository's root.
    path: String,
    code: String,
}

/// What a figure counts, how, and what it is at most: lower a bound when its figure falls.
type Figure = (&'static str, fn(&[Source]) -> usize, usize);

const FIGURES: &[Figure] = &[
    ("files of vmm that import rt", rt_in_vmm, 4),
    // 41 of them are tunings, memory in the place of registers, pages in a guest's RAM, and pages that a protected guest shares.
    // 4 are used across the borders of its crates; 32 are the builder, Embedder, mirror, and
    // calls for threads, snapshots and unplugged vCPUs. Two are kernel's parameters that doctor and bench name.
    // One tells demo whether frequencies are measured.
    // 71, and 2 traits, are of host's feature undo, which rt, bench and vmm use.
    ("public items of vmm-device", public_items, 788),
    ("public traits of vmm-device", public_traits, 18),
    ("files that name a scenario, median", files_of_a_scenario, 2),
    (
        "verdicts made by hand",
        |all| count(all, "tests/", "\"held\":"),
        0,
    ),
    // Of a report that the program wrote.
    (
        "verdicts read by a key",
        |all| count(all, "tests/", "[\"held\"]"),
        1,
    ),
    ("functions named `of`", |all| count(all, "", "fn of("), 21),
    (
        "functions named `serve`",
        |all| count(all, "", "fn serve("),
        4,
    ),
    (
        "locks that ignore a panic",
        |all| count(all, "", "into_inner"),
        26,
    ),
];

const PRODUCT: [&str; 6] = ["benches", "dt", "host-bpf", "rt", "vmm", "vmm-device"];

#[test]
fn no_figure_rises() {
    let all = sources();
    for folder in PRODUCT {
        let prefix = format!("{folder}/");
        let own = all.iter().filter(|one| one.path.starts_with(&prefix));
        let lines: usize = own.map(|one| one.code.lines().count()).sum();
        println!("{lines:>6} lines of {folder}");
    }
    let mut risen = Vec::new();
    for (what, of, most) in FIGURES {
        let figure = of(&all);
        println!("{figure:>6} {what}, at most {most}");
        if figure > *most {
            risen.push(format!("{what}: {figure}, at most {most}"));
        }
    }
    assert!(risen.is_empty(), "{risen:#?}");
}

#[test]
fn tests_are_no_code() {
    let text = "pub fn of() {}\n#[cfg(test)]\nmod tests {\n    fn of() {}\n}\n";
    assert_eq!(without_tests(text), "pub fn of() {}\n");
    assert_eq!(without_tests("fn a() {}\n"), "fn a() {}\n");
    assert!(is_of_tests("vmm/src/doctor/tests.rs") && is_of_tests("rt/tests/rt/main.rs"));
    assert!(is_of_tests("vmm/src/hint_tests.rs") && !is_of_tests("tests/src/main.rs"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources() -> Vec<Source> {
    let mut all = Vec::new();
    for folder in PRODUCT.iter().chain(&["fuzz", "lab", "tests"]) {
        below(&root().join(folder), &mut all);
    }
    assert!(all.len() > 300, "{} files", all.len());
    all
}

fn below(folder: &Path, all: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        let from_root = path.strip_prefix(root()).expect("below the root");
        let name = from_root.to_string_lossy().into_owned();
        if path.is_dir() {
            if entry.file_name() != "target" {
                below(&path, all);
            }
        } else if name.ends_with(".rs") && !is_of_tests(&name) {
            let text = fs::read_to_string(&path).expect("a source");
            all.push(Source {
                path: name,
                code: without_tests(&text).to_owned(),
            });
        }
    }
}

/// The crate `tests` itself is none of it.
fn is_of_tests(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}

/// A file's tests are its last item.
fn without_tests(text: &str) -> &str {
    text.split_once("#[cfg(test)]\nmod tests {")
        .map_or(text, |(code, _)| code)
}

fn count(all: &[Source], folder: &str, what: &str) -> usize {
    let own = all.iter().filter(|one| one.path.starts_with(folder));
    own.map(|one| one.code.matches(what).count()).sum()
}

fn rt_in_vmm(all: &[Source]) -> usize {
    let own = all.iter().filter(|one| one.path.starts_with("vmm/"));
    own.filter(|one| one.code.contains("vcpufreq_rt::")).count()
}

fn public_items(all: &[Source]) -> usize {
    let kinds = [
        "fn",
        "const fn",
        "unsafe fn",
        "struct",
        "enum",
        "trait",
        "const",
        "type",
    ];
    let lines = all.iter().filter(|one| of_library(one));
    let lines = lines.flat_map(|one| one.code.lines());
    let items = lines.filter_map(|line| line.trim_start().strip_prefix("pub "));
    items
        .filter(|item| {
            kinds
                .iter()
                .any(|kind| item.starts_with(&format!("{kind} ")))
        })
        .count()
}

fn of_library(one: &Source) -> bool {
    one.path.starts_with("vmm-device/") && one.path.contains("/src/")
}

fn public_traits(all: &[Source]) -> usize {
    let own = all.iter().filter(|one| of_library(one));
    own.map(|one| one.code.matches("pub trait ").count()).sum()
}

/// Of all scenarios, by the tables that map their names to functions.
fn files_of_a_scenario(all: &[Source]) -> usize {
    let tables = ["", "bpf/", "bpf/scx/"].map(|at| format!("tests/src/scenarios/{at}mod.rs"));
    let tables = all.iter().filter(|one| tables.contains(&one.path));
    let rows = tables.flat_map(|table| table.code.lines());
    let rows = rows.filter(|line| line.contains("\" => "));
    let names = rows.flat_map(|line| line.split('"').skip(1).step_by(2));
    let mut files: Vec<usize> = names
        .map(|name| {
            let quoted = format!("\"{name}\"");
            all.iter().filter(|one| one.code.contains(&quoted)).count()
        })
        .collect();
    files.sort_unstable();
    assert!(files.len() > 90, "{} scenarios", files.len());
    files[files.len() / 2]
}
