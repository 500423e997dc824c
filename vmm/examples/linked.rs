// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes the licences of the code that the program for a target is linked with, besides the
//! project's own, into a file, for packages:
//!
//! ```sh
//! cargo run -p vcpufreq --no-default-features --example linked -- TARGET FILE
//! ```
//!
//! Which crates these are comes from cargo, their texts from its registry. The texts of the C libraries
//! and of Rust's standard library are Debian's. A part without a text is an error. The same parts
//! give the same bytes: no path and no time is in the file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// What is linked besides crates: a Debian package whose copyright file has its licence, and its name.
const LIBRARIES: [(&str, &str); 6] = [
    ("libstd-rust-dev", "Rust's standard library"),
    ("libc6", "glibc"),
    ("libelf-dev", "libelf"),
    ("libgcc-s1", "libgcc"),
    ("libzstd-dev", "libzstd"),
    ("zlib1g-dev", "zlib"),
];
const COPYRIGHTS: &str = "/usr/share/doc";
/// How the names of licence files in crates begin, in capitals.
const STARTS: [&str; 6] = [
    "COPYING",
    "COPYRIGHT",
    "LICENCE",
    "LICENSE",
    "NOTICE",
    "UNLICENSE",
];
/// A crate with sources of a C library that is linked, and their folder.
const BUNDLED: (&str, &str) = ("libbpf-sys", "libbpf");

/// A part of the program.
pub struct LicensedPart {
    /// Its line in the list.
    pub line: String,
    /// The name of each text, and the text.
    pub texts: Vec<(String, String)>,
}

/// The crates that are linked with the program for this target.
///
/// # Errors
/// What cargo or the file system refuses, and a crate without a licence's text.
pub fn crates(target: &str) -> Result<Vec<LicensedPart>> {
    // Macros' crates run in the compiler alone.
    let edges = "normal,no-proc-macro";
    let tree = [
        "tree",
        "--prefix=none",
        "--format={p}",
        "--package=vcpufreq",
    ];
    let linked = cargo(&[&tree[..], &["--target", target, "--edges", edges]].concat())?;
    let linked: BTreeSet<&str> = linked.lines().filter_map(name_and_version).collect();
    let metadata = [
        "metadata",
        "--format-version=1",
        "--filter-platform",
        target,
    ];
    let metadata: Value = serde_json::from_str(&cargo(&metadata)?)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let text = |package: &Value, key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let mut parts = Vec::new();
    for package in packages {
        let name = text(package, "name");
        let full = format!("{name} v{}", text(package, "version"));
        // Those of this project have no source.
        if package["source"].is_null() || !linked.contains(full.as_str()) {
            continue;
        }
        let manifest = PathBuf::from(text(package, "manifest_path"));
        let folder = manifest.parent().context("a crate's folder")?;
        let mut texts = texts_in(folder, &full)?;
        if name == BUNDLED.0 {
            texts.extend(texts_in(&folder.join(BUNDLED.1), BUNDLED.1)?);
        }
        let line = format!("{full}: {}", text(package, "license"));
        parts.push(LicensedPart { line, texts });
    }
    parts.sort_by(|one, other| one.line.cmp(&other.line));
    Ok(parts)
}

/// `NAME vVERSION` of a line of `cargo tree`.
fn name_and_version(line: &str) -> Option<&str> {
    let (name, rest) = line.split_once(' ')?;
    let version = rest.split(' ').next()?;
    line.get(..name.len() + 1 + version.len())
}

fn cargo(words: &[&str]) -> Result<String> {
    let program = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(program);
    cargo.args(words).arg("--locked").stderr(Stdio::inherit());
    let output = cargo.output().context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo {} failed", words.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}

/// The licence files in a folder of the part `of`.
fn texts_in(folder: &Path, of: &str) -> Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for file in fs::read_dir(folder).with_context(|| of.to_owned())? {
        let file = file?;
        let name = file.file_name().to_string_lossy().into_owned();
        let capitals = name.to_uppercase();
        let named = STARTS.iter().any(|start| capitals.starts_with(start));
        if named && file.file_type()?.is_file() {
            let bytes = fs::read(file.path())?;
            let text = String::from_utf8_lossy(&bytes).into_owned();
            texts.push((format!("{of}, {name}"), text));
        }
    }
    ensure!(!texts.is_empty(), "{of} has no licence file");
    texts.sort();
    Ok(texts)
}

/// The libraries besides crates, by the copyright files below a folder.
///
/// # Errors
/// A package whose copyright file can't be read.
pub fn libraries(copyrights: &Path) -> Result<Vec<LicensedPart>> {
    let part = |(package, name): (&str, &str)| {
        let file = copyrights.join(package).join("copyright");
        let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let line = format!("{name}: see {package}");
        let texts = vec![(format!("{package} of Debian, copyright"), text)];
        Ok(LicensedPart { line, texts })
    };
    LIBRARIES.into_iter().map(part).collect()
}

/// The file: a list of the parts, then each text once, below the names of all that it is of. Texts
/// that differ in white space alone are the same.
#[must_use]
pub fn file(parts: &[LicensedPart]) -> String {
    let mut texts: Vec<(Vec<&str>, &str)> = Vec::new();
    for (name, text) in parts.iter().flat_map(|part| &part.texts) {
        let same = |(_, other): &&mut (Vec<&str>, &str)| {
            text.split_whitespace().eq(other.split_whitespace())
        };
        match texts.iter_mut().find(same) {
            Some((names, _)) => names.push(name),
            None => texts.push((vec![name], text)),
        }
    }
    let mut file =
        "The program vcpufreq is linked with these parts besides its own.\n\n".to_owned();
    for part in parts {
        file += &format!("{}\n", part.line);
    }
    for (names, text) in texts {
        let text = text.trim_matches(['\r', '\n']);
        file += &format!("\n{}\n{}\n\n{text}\n", "=".repeat(72), names.join("\n"));
    }
    file
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [target, to] = words.as_slice() else {
        anyhow::bail!("name the target, and the file to write");
    };
    let mut parts = libraries(Path::new(COPYRIGHTS))?;
    parts.extend(crates(target)?);
    fs::write(to, file(&parts)).with_context(|| to.clone())
}
