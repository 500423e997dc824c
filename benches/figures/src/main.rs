// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make figures`: writes the tables of figures in README.md and docs/ from
//! the JSON in out/. With `paths` it first measures this machine's KVM and
//! writes out/paths.json, for `make bench-paths`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use vcpufreq_figures::{whole, write_all};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("figures: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<()> {
    let repo = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let repo = repo.context("the crate is not in benches/")?;
    if std::env::args().nth(1).as_deref() == Some("paths") {
        whole(repo)?;
        println!("out/paths.json has all figures");
    }
    for line in write_all(repo)? {
        println!("{line}");
    }
    Ok(())
}
