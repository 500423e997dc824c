// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: the packages' list of licences has each crate that is linked, with a text, and none of
//! the project; texts come once, and no path of this machine is among them.
#![allow(clippy::unwrap_used)]

#[path = "../examples/linked.rs"]
mod linked;

use linked::{LicensedPart, crates, file, libraries};

const TARGET: &str = "aarch64-unknown-linux-gnu";

#[test]
fn each_linked_crate_is_listed_with_a_text() {
    let parts = crates(TARGET).unwrap();
    let file = file(&parts);
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
    assert_eq!(file, linked::file(&crates(TARGET).unwrap()));
}

#[test]
fn equal_texts_come_once() {
    let part = |line: &str, text: &str| LicensedPart {
        line: line.to_owned(),
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
    assert_eq!(file(&parts), expected);
}

#[test]
fn a_library_without_a_copyright_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = libraries(folder.path()).err().unwrap();
    let named = format!("{error:#}").contains("libstd-rust-dev/copyright");
    assert!(named, "{error:#}");
}
