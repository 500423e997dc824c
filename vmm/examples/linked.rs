// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes two lists of what the program for a target is linked with, besides the project's own code,
//! into a folder, for packages: `third-party-licences`, the licences, and `vcpufreq.cdx.json`, the
//! parts as CycloneDX 1.5:
//!
//! ```sh
//! cargo run -p vcpufreq --no-default-features --example linked -- TARGET FOLDER
//! ```
//!
//! Which crates these are comes from cargo, their texts from its registry. The texts and versions of the
//! C libraries and of Rust's standard library are Debian's. A part without a text is an error. The same
//! parts give the same bytes: no path and no time is in the files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

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
pub struct LinkedPart {
    /// Its line in the list of licences.
    pub line: String,
    /// Itself in the list for programs.
    pub component: Value,
    /// The name of each text, and the text.
    pub texts: Vec<(String, String)>,
}

/// The crates that are linked with the program for this target.
///
/// # Errors
/// What cargo or the file system refuses, and a crate without a licence's text.
pub fn crates(target: &str) -> Result<Vec<LinkedPart>> {
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
        let (name, version) = (text(package, "name"), text(package, "version"));
        let full = format!("{name} v{version}");
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
        // Before SPDX, a slash stood between licences to choose from.
        let licence = text(package, "license").replace('/', " OR ");
        ensure!(!licence.is_empty(), "{full} names no licence");
        let mut component = component(&name, &version, "cargo");
        component["licenses"] = json!([{ "expression": licence }]);
        parts.push(LinkedPart {
            line: format!("{full}: {licence}"),
            component,
            texts,
        });
    }
    parts.sort_by(|one, other| one.line.cmp(&other.line));
    Ok(parts)
}

/// A library in the list for programs, by its name in a registry of this kind.
fn component(name: &str, version: &str, registry: &str) -> Value {
    // A plus stands for a space in such an address.
    let address = format!("pkg:{registry}/{name}@{version}").replace('+', "%2B");
    json!({
        "type": "library", "bom-ref": address, "name": name, "version": version, "purl": address,
    })
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

/// The libraries besides crates, by the copyright files below a folder and the versions of Debian's
/// packages.
///
/// # Errors
/// A package whose copyright file or version can't be read.
pub fn libraries(
    copyrights: &Path,
    version: impl Fn(&str) -> Result<String>,
) -> Result<Vec<LinkedPart>> {
    let part = |(package, name): (&str, &str)| {
        let file = copyrights.join(package).join("copyright");
        let bytes = fs::read(&file).with_context(|| file.display().to_string())?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok(LinkedPart {
            line: format!("{name}: see {package}"),
            component: component(package, &version(package)?, "deb/debian"),
            texts: vec![(format!("{package} of Debian, copyright"), text)],
        })
    };
    LIBRARIES.into_iter().map(part).collect()
}

/// The version of a Debian package on this machine, of whichever architecture.
fn installed_version(package: &str) -> Result<String> {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${Version}\n", package]);
    let output = query.output().context("cannot run dpkg-query")?;
    let text = String::from_utf8(output.stdout)?;
    // Of a package that was removed, the version is empty.
    let first = text.lines().find(|line| !line.is_empty());
    Ok(first
        .with_context(|| format!("{package} is not installed"))?
        .to_owned())
}

/// The list for programs: CycloneDX 1.5.
#[must_use]
pub fn bill_of_materials(parts: &[LinkedPart]) -> String {
    let mut own = component("vcpufreq", env!("CARGO_PKG_VERSION"), "cargo");
    own["type"] = "application".into();
    own["licenses"] = json!([{ "expression": env!("CARGO_PKG_LICENSE") }]);
    let components: Vec<&Value> = parts.iter().map(|part| &part.component).collect();
    let list = json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": { "component": own }, "components": components,
    });
    format!("{list:#}\n")
}

/// The licences: a list of the parts, then each text once, below the names of all that it is of. Texts
/// that differ in white space alone are the same.
#[must_use]
pub fn licences(parts: &[LinkedPart]) -> String {
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
        anyhow::bail!("name the target, and the folder to write to");
    };
    let mut parts = libraries(Path::new(COPYRIGHTS), installed_version)?;
    parts.extend(crates(target)?);
    for (name, text) in [
        ("third-party-licences", licences(&parts)),
        ("vcpufreq.cdx.json", bill_of_materials(&parts)),
    ] {
        let path = Path::new(to).join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
