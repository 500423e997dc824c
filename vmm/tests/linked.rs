// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: the packages' list of licences has each crate that is linked, with a text, and none of
//! the project; texts come once, and no path of this machine is among them. The list for programs has
//! the same crates, and each library with its version.
#![allow(clippy::unwrap_used)]

#[path = "../examples/linked.rs"]
mod linked;

use serde_json::Value;

use linked::{LinkedPart, bill_of_materials, crates, libraries, licences};

const TARGET: &str = "aarch64-unknown-linux-gnu";

#[test]
fn each_linked_crate_is_listed_with_a_text() {
    let parts = crates(TARGET).unwrap();
    let file = licences(&parts);
    for name in ["anyhow", "kvm-ioctls", "libbpf-sys", "serde_json"] {
        let listed = file
            .lines()
            .any(|line| line.starts_with(&format!("{name} v")));
        assert!(listed, "{name}");
    }
    assert!(file.contains("\nlibbpf, LICENSE.BSD-2-Clause\n"), "{file}");
    assert!(parts.iter().all(|part| !part.texts.is_empty()));
    // Macros' crates, and the project's own.
    for name in ["syn", "vcpufreq"] {
        let listed = parts.iter().any(|part| part.line.starts_with(name));
        assert!(!listed, "{name}");
    }
    assert!(!file.contains(env!("CARGO_MANIFEST_DIR")) && !file.contains("registry/src"));
    assert_eq!(file, licences(&crates(TARGET).unwrap()));
}

#[test]
fn the_list_for_programs_has_the_same_parts() {
    let folder = tempfile::tempdir().unwrap();
    for package in [
        "libstd-rust-dev",
        "libc6",
        "libelf-dev",
        "libgcc-s1",
        "libzstd-dev",
        "zlib1g-dev",
    ] {
        std::fs::create_dir(folder.path().join(package)).unwrap();
        std::fs::write(folder.path().join(package).join("copyright"), package).unwrap();
    }
    let mut parts = libraries(folder.path(), |package| Ok(format!("1+{package}"))).unwrap();
    parts.extend(crates(TARGET).unwrap());
    let list: Value = serde_json::from_str(&bill_of_materials(&parts)).unwrap();
    assert_eq!(list["metadata"]["component"]["name"], "vcpufreq");
    let components = list["components"].as_array().unwrap();
    assert_eq!(components.len(), parts.len());
    let named = |name: &str| components.iter().find(|one| one["name"] == name).unwrap();
    assert_eq!(named("libc6")["purl"], "pkg:deb/debian/libc6@1%2Blibc6");
    let own = named("libbpf-sys");
    let address = format!("pkg:cargo/libbpf-sys@{}", own["version"].as_str().unwrap());
    assert_eq!(own["purl"], address.replace('+', "%2B"));
    let licence = |one: &Value| one["licenses"][0]["expression"].as_str().map(str::to_owned);
    assert!(licence(named("serde_json")).unwrap().contains(" OR "));
    let slash = components
        .iter()
        .filter_map(licence)
        .find(|licence| licence.contains('/'));
    assert_eq!(slash, None);
}

#[test]
fn equal_texts_come_once() {
    let part = |line: &str, text: &str| LinkedPart {
        line: line.to_owned(),
        component: Value::Null,
        texts: vec![(format!("{line}, LICENSE"), text.to_owned())],
    };
    let parts = [
        part("a", "One\n  text.\n"),
        part("b", "Other"),
        part("c", "One text."),
    ];
    let rule = "=".repeat(72);
    let expected = format!(
        "The program vcpufreq is linked with these parts besides its own.\n\na\nb\nc\n\n{rule}\n\
         a, LICENSE\nc, LICENSE\n\nOne\n  text.\n\n{rule}\nb, LICENSE\n\nOther\n"
    );
    assert_eq!(licences(&parts), expected);
}

#[test]
fn a_library_without_a_copyright_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = libraries(folder.path(), |_| Ok("1".to_owned()))
        .err()
        .unwrap();
    let named = format!("{error:#}").contains("libstd-rust-dev/copyright");
    assert!(named, "{error:#}");
}
