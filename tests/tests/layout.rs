// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The layout of the sources, as docs/architecture.md draws it:
//! - a crate depends on crates below it only
//! - the modules of a crate use each other without a cycle, and none uses what a module above it
//!   defines, if that one uses it
//! - of the program's commands none uses another one, but for those named here
//! - the device's crate needs thiserror alone
//! - no trait that others wrap has a method with a default
//! - each threat of the device's README and of SECURITY.md names a test that exists
//! - no two types have one name
//! - unsafe code is where an attribute gives the reason; a crate without such forbids it

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

#[path = "layout/metadata.rs"]
mod metadata;
#[path = "layout/uses.rs"]
mod uses;

use metadata::{name, packages};
use uses::{cycles, cycles_with_parts, uses_of};

/// Each crate and what it may depend on, the lowest first.
const ARROWS: &[(&str, &[&str])] = &[
    ("vcpufreq-device", &[]),
    ("vcpufreq-dt", &[]),
    ("vcpufreq-host", &["vcpufreq-device"]),
    ("vcpufreq-bridge", &["vcpufreq-device", "vcpufreq-host"]),
    (
        "vcpufreq-host-bpf",
        &["vcpufreq-device", "vcpufreq-host", "vcpufreq-bridge"],
    ),
    ("vcpufreq-rt", &["vcpufreq-device", "vcpufreq-host"]),
    ("vcpufreq-load", &["vcpufreq-device", "vcpufreq-host"]),
    (
        "vcpufreq-bench",
        &[
            "vcpufreq-device",
            "vcpufreq-dt",
            "vcpufreq-host",
            "vcpufreq-bridge",
            "vcpufreq-load",
        ],
    ),
    ("vcpufreq-figures", &["vcpufreq-bench"]),
    (
        "vcpufreq-vm",
        &[
            "vcpufreq-device",
            "vcpufreq-dt",
            "vcpufreq-host",
            "vcpufreq-bridge",
        ],
    ),
    (
        "vcpufreq",
        &[
            "vcpufreq-device",
            "vcpufreq-dt",
            "vcpufreq-host",
            "vcpufreq-bridge",
            "vcpufreq-host-bpf",
            "vcpufreq-vm",
            "vcpufreq-rt",
            "vcpufreq-bench",
        ],
    ),
    (
        "vcpufreq-tests",
        &[
            "vcpufreq-device",
            "vcpufreq-host",
            "vcpufreq-bridge",
            "vcpufreq-host-bpf",
            "vcpufreq-bench",
            "vcpufreq-figures",
            "vcpufreq-load",
        ],
    ),
    (
        "vcpufreq-fuzz",
        &[
            "vcpufreq-device",
            "vcpufreq-dt",
            "vcpufreq-host",
            "vcpufreq-bridge",
            "vcpufreq-host-bpf",
            "vcpufreq-rt",
            "vcpufreq-bench",
            "vcpufreq-vm",
            "vcpufreq",
        ],
    ),
    ("vcpufreq-orders", &["vcpufreq-device", "vcpufreq-bridge"]),
    ("vcpufreq-lab", &["vcpufreq-tests"]),
];

#[test]
fn crates_depend_on_crates_below_them() {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let packages = packages();
    let names: BTreeSet<&str> = packages.iter().filter_map(name).collect();
    assert_eq!(names, allowed.keys().copied().collect());
    for package in &packages {
        let of = name(package).expect("a name");
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        for on in dependencies.iter().filter_map(name) {
            let own = names.contains(on);
            assert!(!own || allowed[of].contains(&on), "{of} depends on {on}");
        }
    }
}

#[test]
fn no_crate_has_a_cycle_of_modules() {
    for package in packages() {
        let manifest = package["manifest_path"].as_str().expect("a path");
        let sources = Path::new(manifest).with_file_name("src");
        let found = cycles(&uses_of(&sources));
        assert!(found.is_empty(), "{}: {found:?}", sources.display());
        let found = cycles_with_parts(&sources);
        assert!(found.is_empty(), "{}: {found:#?}", sources.display());
    }
}

#[test]
fn commands_use_no_other_command() {
    const COMMANDS: [&str; 7] = ["run", "serve", "qemu", "doctor", "dt", "scx", "trace"];
    // Its server.
    const MAY: [(&str, &str); 1] = [("qemu", "serve")];
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vmm/src");
    let uses = uses_of(&sources);
    let mut found = BTreeSet::new();
    for (module, used) in &uses {
        let command = |of: &[String]| {
            COMMANDS
                .iter()
                .copied()
                .find(|one| of.first().is_some_and(|first| first == one))
        };
        let Some(own) = command(module) else { continue };
        let others = used.iter().filter_map(|used| command(used));
        found.extend(
            others
                .filter(|other| *other != own)
                .map(|other| (own, other)),
        );
    }
    assert_eq!(found, MAY.into());
}

#[test]
fn the_device_needs_one_crate() {
    let packages = packages();
    let device = |package: &&Value| name(package) == Some("vcpufreq-device");
    let device = packages.iter().find(device).expect("the device");
    let dependencies = device["dependencies"].as_array().expect("dependencies");
    let needed = dependencies
        .iter()
        .filter(|one| one["kind"].is_null() && one["optional"] == false);
    let needed: Vec<&str> = needed.filter_map(name).collect();
    assert_eq!(needed, ["thiserror"]);
}

#[test]
fn traits_that_others_wrap_have_no_default_methods() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let traits = [
        ("Actuator", "vmm-device/device/src/ports.rs"),
        ("PageMemory", "vmm-device/device/src/pages.rs"),
        ("KvmVm", "vmm-device/bridge/src/offload.rs"),
        ("Backend", "vmm-device/bridge/src/bridge/backend.rs"),
        ("RunningBackend", "vmm-device/bridge/src/bridge/backend.rs"),
        ("Hooks", "vmm/vm/src/environment.rs"),
    ];
    for (of, file) in traits {
        let text = fs::read_to_string(root.join(file)).expect(file);
        let mut items = syn::parse_file(&text).expect("Rust").items.into_iter();
        let methods = items.find_map(|item| match item {
            syn::Item::Trait(item) if item.ident == of => Some(item.items),
            _ => None,
        });
        let methods = methods.unwrap_or_else(|| panic!("{file} has no {of}"));
        assert!(!methods.is_empty());
        for method in methods {
            if let syn::TraitItem::Fn(method) = method {
                let name = &method.sig.ident;
                assert!(method.default.is_none(), "{of}::{name} has a default");
            }
        }
    }
}

#[test]
fn a_name_is_one_types() {
    let mut places: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for package in packages() {
        let manifest = package["manifest_path"].as_str().expect("a path");
        for file in sources(&Path::new(manifest).with_file_name("src")) {
            let text = fs::read_to_string(&file).expect("a source");
            for item in syn::parse_file(&text).expect("Rust").items {
                let declared = type_name(&item).into_iter();
                declared.for_each(|name| places.entry(name).or_default().push(file.clone()));
            }
        }
    }
    assert!(places.len() >= 500, "{}", places.len());
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "{places:#?}");
}

/// The name of the type or trait that an item declares.
fn type_name(item: &syn::Item) -> Option<String> {
    let name = match item {
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

#[test]
fn a_cycle_is_found_at_each_depth() {
    let sources = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = sources.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    };
    write("lib.rs", "mod a; mod b; pub use a::one;");
    write("a/mod.rs", "mod c; mod d; pub fn one() { c::one() }");
    write(
        "a/c.rs",
        "use super::d::{self, two}; pub fn one() { two() }",
    );
    write("a/d.rs", "pub fn two() { let _ = crate::b::three; }");
    write(
        "b.rs",
        "pub fn three() {}\n#[cfg(test)] mod tests { use crate::a; }",
    );
    assert_eq!(cycles(&uses_of(sources.path())), Vec::<Vec<String>>::new());
    write("b.rs", "pub fn three() { crate::a::one() }");
    assert_eq!(cycles(&uses_of(sources.path())), [["a", "b"]]);
    write("b.rs", "");
    write("a/d.rs", "use super::c; pub fn two() { c::one() }");
    assert_eq!(cycles(&uses_of(sources.path())), [["a::c", "a::d"]]);
    // By a name that the crate gives on.
    write("a/d.rs", "");
    write("b.rs", "pub fn three() { crate::one() }");
    write(
        "a/c.rs",
        "use crate::b::three; pub fn one() { three() } pub fn two() {}",
    );
    write("a/mod.rs", "mod c; mod d; pub use c::one;");
    assert_eq!(cycles(&uses_of(sources.path())), [["a", "b"]]);
    // By what the module above defines.
    write("b.rs", "");
    write("a/c.rs", "pub fn one() { super::own() } pub fn two() {}");
    write("a/mod.rs", "mod c; mod d; pub use c::one; fn own() {}");
    assert_eq!(cycles(&uses_of(sources.path())), Vec::<Vec<String>>::new());
    assert_eq!(cycles_with_parts(sources.path()), ["a and a::c"]);
    write("a/c.rs", "pub(super) fn one() { crate::b::three() }");
    assert_eq!(cycles_with_parts(sources.path()), Vec::<String>::new());
    // A variable of a module's name, and where an item is visible.
    write("a/c.rs", "pub(super) fn one() {} pub fn two() {}");
    write(
        "a/mod.rs",
        "mod c; pub use c::one; fn own() { let d = 1; d; }",
    );
    write("a/d.rs", "use super::own; pub fn two() { own() }");
    assert_eq!(cycles_with_parts(sources.path()), Vec::<String>::new());
    write("a/c.rs", "use crate::b::three; pub fn one() { three() }");
    // In a macro.
    write("b.rs", "pub fn three() { assert!(crate::a::one()) }");
    assert_eq!(cycles(&uses_of(sources.path())), [["a", "b"]]);
}

#[test]
fn each_attack_of_the_security_page_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("SECURITY.md")).expect("the page");
    let table = page
        .split_once("| asset | attack from |")
        .expect("a table")
        .1;
    let rows = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let rows: Vec<&str> = rows.collect();
    let texts = |folders: &[&str]| -> String {
        let files = folders
            .iter()
            .flat_map(|folder| sources(&root.join(folder)));
        files
            .map(|file| fs::read_to_string(file).expect("a source"))
            .collect()
    };
    let tests = texts(&["vmm-device", "host-bpf", "rt", "vmm", "fuzz", "lab"]);
    let scenarios = texts(&["tests/src/scenarios"]);
    for row in &rows {
        let last = row
            .trim_end_matches(" |")
            .rsplit_once("| ")
            .expect("columns")
            .1;
        for name in last.split(", ") {
            let name = name.trim_matches('`');
            let is_test = tests.contains(&format!("fn {name}()"));
            let is_scenario = scenarios.contains(&format!("\"{name}\""));
            assert!(is_test || is_scenario, "{name} is no test: {row}");
        }
    }
    assert!(rows.len() >= 12, "{rows:?}");
}

#[test]
fn unsafe_code_is_an_exception_with_a_reason() {
    let of_crate = |package: &Value| {
        let manifest = package["manifest_path"].as_str().expect("a path");
        let folder = Path::new(manifest).with_file_name("src");
        let texts = sources(&folder).into_iter();
        let texts = texts.map(|file| fs::read_to_string(file).expect("a source"));
        texts.collect::<Vec<_>>()
    };
    let mut exceptions = 0;
    for package in packages() {
        let texts = of_crate(&package);
        let lines = texts.iter().flat_map(|text| text.lines());
        let lines: Vec<&str> = lines.filter(|line| line.contains("(unsafe_code")).collect();
        let forbids = |line: &str| line.contains("forbid(unsafe_code)");
        let excepts = lines.iter().filter(|line| !forbids(line));
        for line in excepts.clone() {
            assert!(line.contains("(unsafe_code, reason = \""), "{line}");
        }
        let count = excepts.count();
        let always = lines.contains(&"#![forbid(unsafe_code)]");
        assert!(
            count > 0 || always,
            "{:?} forbids no unsafe",
            name(&package)
        );
        exceptions += count;
    }
    assert!(exceptions >= 10, "{exceptions}");
}

#[test]
fn each_threat_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("vmm-device/README.md")).expect("the README");
    let is_threat = |line: &&str| {
        let number = line.strip_prefix("| ").and_then(|rest| rest.chars().next());
        number.is_some_and(|first| first.is_ascii_digit())
    };
    let rows: Vec<&str> = page.lines().filter(is_threat).collect();
    let test = |row: &&'_ str| {
        let last = row
            .strip_suffix("` |")
            .and_then(|row| row.rsplit_once("| `"));
        last.unwrap_or_else(|| panic!("no test: {row}"))
            .1
            .to_owned()
    };
    let tests: BTreeSet<String> = rows.iter().map(test).collect();
    let folders = ["vmm-device", "vmm/tests"];
    let files = folders
        .iter()
        .flat_map(|folder| sources(&root.join(folder)));
    let texts: Vec<String> = files
        .map(|file| fs::read_to_string(file).expect("a source"))
        .collect();
    let exists = |test: &&String| {
        let start = format!("fn {test}(");
        texts.iter().any(|text| text.contains(&start))
    };
    let missing: Vec<_> = tests.iter().filter(|test| !exists(test)).collect();
    assert!(rows.len() >= 12 && missing.is_empty(), "{missing:?}");
}

/// All files of Rust below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
    found
}
