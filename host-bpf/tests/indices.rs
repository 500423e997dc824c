// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A number that a VMM or a guest has chosen indexes an array of the module only where a mispredicted
//! check can't lead beyond it (`array_index_nospec`).

use std::{fs, path::Path};

/// Numbers of the module's own: a loop's, and what was checked before it was stored.
const OWN: [&str; 2] = ["i", "work->domain"];

#[test]
fn numbers_of_others_are_bounded_against_speculation() {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("module");
    let mut bounded = 0;
    for file in fs::read_dir(module).unwrap().flatten() {
        let name = file.file_name().into_string().unwrap();
        if !name.ends_with(".c") && !name.ends_with(".h") {
            continue;
        }
        let text = fs::read_to_string(file.path()).unwrap();
        for array in ["->domains[", "->works["] {
            for (at, _) in text.match_indices(array) {
                let index = &text[at + array.len()..];
                let index = index.split(']').next().unwrap();
                let is_bounded = index.starts_with("array_index_nospec(");
                bounded += u32::from(is_bounded);
                assert!(
                    is_bounded || OWN.contains(&index),
                    "{name}: {array}{index}]"
                );
            }
        }
    }
    assert_eq!(bounded, 2, "the module has other arrays");
}
