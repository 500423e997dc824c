// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Each target takes the corpus, each file of it with a byte changed or cut short, and bytes at
//! random.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use vcpufreq_fuzz::TARGETS;

fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let files = fs::read_dir(&folder).unwrap_or_else(|why| panic!("{}: {why}", folder.display()));
    let mut files: Vec<PathBuf> = files.map(|file| file.expect("an entry").path()).collect();
    files.sort();
    files
}

#[test]
fn each_target_takes_its_corpus() {
    for (name, target) in TARGETS {
        let files = corpus(name);
        assert!(!files.is_empty(), "{name} has no corpus");
        for file in files {
            let whole = fs::read(&file).expect("a file");
            target(&whole);
            // Some 200 places of each.
            for at in (0..whole.len()).step_by(1 + whole.len() / 200) {
                let mut changed = whole.clone();
                changed[at] ^= 1 << (at % 8);
                target(&changed);
                target(&whole[..at]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_target_takes_anything(data in prop::collection::vec(any::<u8>(), 0..512)) {
        for (_, target) in TARGETS {
            target(&data);
        }
    }
}
