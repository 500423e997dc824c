// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of figures in the pages, written from the JSON in `out/`.
//!
//! A table stands between `<!-- figures:NAME -->` and `<!-- end -->`, and ends
//! with the build that its figures are from. All inputs have to be of one
//! build. A table whose input is missing stays as it is.

mod ablation;
mod bench;
mod fuzz;
mod holds;
mod kvm;
mod lab;
mod late;
mod markdown;
mod paths;
mod paths_report;
mod peers;
mod rt;
mod times;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

pub use paths::whole;
pub use paths_report::{Access, rows_of};

const END: &str = "<!-- end -->";

/// What a generator makes of its inputs: Markdown, or `None` if one lacks the figures.
type Make = fn(&[Value]) -> Option<String>;

/// A table: its name, the files in `out/` that it needs, and what makes it.
const TABLES: &[(&str, &[&str], Make)] = &[
    ("readme", &["bench-2+2.json"], bench::readme),
    (
        "bench",
        &["bench-2+2.json", "bench-4+3+1.json"],
        bench::metrics,
    ),
    ("jobs", &["bench-2+2.json", "bench-4+3+1.json"], bench::jobs),
    (
        "contended",
        &["bench-2+2.json", "bench-4+3+1.json"],
        bench::contended,
    ),
    ("holds", &["test.json"], holds::short),
    ("holds-long", &["test-long.json"], holds::long),
    ("dips", &["test-long.json"], lab::dips),
    ("drawn", &["test-long.json"], lab::drawn),
    ("demo", &["demo.json"], lab::demo),
    ("paths", &["paths.json"], paths::table),
    ("fuzz", &["fuzz.json"], fuzz::table),
    ("peers", &["peer-2+2.json", "peer-4+3+1.json"], peers::table),
    ("in-force", &["test-long.json"], lab::in_force),
    ("stores-in-ram", &["test-long.json"], late::stores),
    ("ramps", &["test-long.json"], lab::ramps),
    ("qemu-ramps", &["test-long.json"], lab::qemu_ramps),
    ("contended-ways", &["test-long.json"], lab::contended_ways),
    ("side-channel", &["test-long.json"], lab::side_channel),
    ("bench-protected", &["test-long.json"], bench::protected),
    ("fio", &["test-long.json"], bench::fio),
    ("disk-and-network", &["test-long.json"], rt::io),
    ("rt-latency", &["test-long.json"], rt::latency),
    ("rt-loop", &["test-long.json"], rt::periodic_loop),
];

/// What `make ablation` leaves, and the page that is made of it.
const ABLATIONS: [&str; 3] = [
    "ablation-2+2.json",
    "ablation-4+3+1.json",
    "ablation-pixel6.json",
];
const ABLATION_PAGE: &str = "ablation.md";

/// The table of runs of several builds.
const TIMES: &str = "times";

/// Writes all tables whose inputs are there, and the list of all figures of the bench; a line for
/// each.
///
/// # Errors
/// Inputs of several builds, an input that isn't JSON, or a page that can't be written.
pub fn write_all(repo: &Path) -> Result<Vec<String>> {
    let inputs = Inputs::read(&repo.join("out"))?;
    let mut lines = vec![format!("build {}", inputs.build)];
    let mut tables = BTreeMap::new();
    for (name, files, make) in TABLES {
        let found: Option<Vec<Value>> = files.iter().map(|file| inputs.get(file)).collect();
        match found.and_then(|found| make(&found)) {
            Some(table) => {
                tables.insert(*name, format!("{table}\nBuild {}.\n", inputs.build));
                lines.push(format!("written: {name}"));
            }
            None => lines.push(format!(
                "as it was: {name} needs out/{}",
                files.join(", out/")
            )),
        }
    }
    tables.insert(TIMES, times::table(repo)?);
    for page in pages(repo)? {
        let old = fs::read_to_string(&page)?;
        let new = replaced(&old, &tables).with_context(|| page.display().to_string())?;
        if new != old {
            fs::write(&page, new)?;
        }
    }
    let benches = ["2+2", "4+3+1", "pixel6"].map(|name| inputs.get(&format!("bench-{name}.json")));
    if benches.iter().any(Option::is_some) {
        let benches: Vec<Value> = benches.into_iter().flatten().collect();
        fs::write(repo.join("docs/bench-figures.csv"), bench::csv(&benches))?;
    }
    let ablations: Vec<Value> = ABLATIONS
        .iter()
        .filter_map(|name| inputs.get(name))
        .collect();
    if let Some(page) = ablation::page(&ablations, &inputs.build) {
        fs::write(repo.join("out").join(ABLATION_PAGE), page)?;
        lines.push(format!("written: out/{ABLATION_PAGE}"));
    }
    Ok(lines)
}

/// The JSON files in `out/`, and the one build that they are of, measured with one version of each
/// package.
struct Inputs {
    files: BTreeMap<String, Value>,
    build: String,
}

impl Inputs {
    fn read(out: &Path) -> Result<Self> {
        let names = TABLES.iter().flat_map(|(_, files, _)| *files);
        let mut files = BTreeMap::new();
        let mut builds: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut versions = BTreeMap::new();
        for name in names.chain(&["bench-pixel6.json"]).chain(&ABLATIONS) {
            let path = out.join(name);
            let Ok(text) = fs::read_to_string(&path) else {
                continue;
            };
            let value: Value =
                serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            one_version_each(&mut versions, &value["packages"])
                .with_context(|| format!("out/{name}: measure anew, or remove the older"))?;
            let build = value["build"].as_str().unwrap_or("unknown").to_owned();
            let of_build = builds.entry(build).or_default();
            if files.insert((*name).to_owned(), value).is_none() {
                of_build.push(format!("out/{name}"));
            }
        }
        let one =
            |(build, files): (String, Vec<String>)| format!("{} of {build}", files.join(", "));
        if builds.len() > 1 {
            let all: Vec<String> = builds.into_iter().map(one).collect();
            bail!(
                "figures of several builds: {}; measure anew, or remove the older",
                all.join("; ")
            );
        }
        let build = builds.into_keys().next();
        let build =
            build.context("out/ has no figures; run make bench, make bench-paths, make demo")?;
        Ok(Self { files, build })
    }

    fn get(&self, name: &str) -> Option<Value> {
        self.files.get(name).cloned()
    }
}

/// Adds the versions of a file's packages, by name and architecture. An error if another file was
/// measured with another version: one table would mix two.
fn one_version_each(known: &mut BTreeMap<String, String>, packages: &Value) -> Result<()> {
    let text = |package: &Value, key: &str| package[key].as_str().unwrap_or_default().to_owned();
    for package in packages.as_array().into_iter().flatten() {
        let name = [text(package, "name"), text(package, "architecture")].join(":");
        let version = text(package, "version");
        let before = known.entry(name.clone()).or_insert(version.clone());
        ensure!(
            *before == version,
            "figures with {name} {before} and with {version}"
        );
    }
    Ok(())
}

/// README.md and the pages in docs/.
fn pages(repo: &Path) -> Result<Vec<PathBuf>> {
    let docs = fs::read_dir(repo.join("docs"))?;
    let docs = docs.filter_map(|entry| Some(entry.ok()?.path()));
    let mut pages: Vec<PathBuf> = docs
        .filter(|path| path.extension().is_some_and(|it| it == "md"))
        .collect();
    pages.extend(["README.md", "fuzz/README.md"].map(|page| repo.join(page)));
    pages.sort();
    Ok(pages)
}

/// The page with these tables in their places.
fn replaced(page: &str, tables: &BTreeMap<&str, String>) -> Result<String> {
    let mut parts = page.split("<!-- figures:");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part
            .split_once(" -->\n")
            .context("a marker without an end")?;
        let (old, after) = rest
            .split_once(END)
            .with_context(|| format!("{name} has no {END}"))?;
        let table = tables.get(name).map_or(old, String::as_str);
        text += &format!("<!-- figures:{name} -->\n{table}{END}{after}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    //! Each marker has its table and each table its marker; a page keeps what isn't written. Where the
    //! lab's figures are typed, the text names commit and command.

    use serde_json::json;

    use super::*;

    #[test]
    fn each_marker_has_a_generator_and_each_generator_a_marker() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .unwrap();
        let mut marked = Vec::new();
        for page in pages(repo).unwrap() {
            let text = fs::read_to_string(&page).unwrap();
            replaced(&text, &BTreeMap::new()).unwrap();
            let names = text.split("<!-- figures:").skip(1);
            marked.extend(names.map(|part| part.split(' ').next().unwrap().to_owned()));
        }
        let mut made: Vec<&str> = TABLES.iter().map(|(name, ..)| *name).collect();
        made.push(TIMES);
        marked.sort();
        made.sort_unstable();
        assert_eq!(marked, made);
    }

    /// The head of a table of the lab's figures that no generator writes, and for which the
    /// paragraph above it names no commit and command.
    fn typed_table(page: &str) -> Option<&str> {
        let paragraphs: Vec<&str> = page.split("\n\n").collect();
        let typed = paragraphs.windows(2).find(|pair| {
            let head = pair[1].trim_start().lines().next().unwrap_or_default();
            let of_lab = head.starts_with('|') && head.contains("(emulated)");
            of_lab && !(pair[0].contains("ommit `") && pair[0].contains("lab/start"))
        });
        typed.map(|pair| pair[1])
    }

    #[test]
    fn a_typed_table_names_its_commit_and_command() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .unwrap();
        let nothing = TABLES.iter().map(|(name, ..)| (*name, String::new()));
        let nothing = nothing.collect();
        for page in pages(repo).unwrap() {
            let text = fs::read_to_string(&page).unwrap();
            let without = replaced(&text, &nothing).unwrap();
            assert_eq!(typed_table(&without), None, "{}", page.display());
        }
        let table = "| what (emulated) | ms |\n|---|---|\n| a | 1 |\n";
        assert!(typed_table(&format!("Medians:\n\n{table}")).is_some());
        let origin = "Commit `409ef2d`, `lab/start run boot`:";
        assert_eq!(typed_table(&format!("{origin}\n\n{table}")), None);
    }

    #[test]
    fn a_table_is_replaced_and_others_stay() {
        let page =
            "a\n<!-- figures:x -->\nold\n<!-- end -->\nb\n<!-- figures:y -->\nkept\n<!-- end -->\n";
        let new = replaced(page, &BTreeMap::from([("x", "new\n".to_owned())])).unwrap();
        assert_eq!(new, page.replace("old", "new"));
        assert!(replaced("<!-- figures:x -->\nold", &BTreeMap::new()).is_err());
    }

    #[test]
    fn figures_of_two_builds_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Inputs::read(dir.path()).is_err(), "nothing is there");
        fs::write(dir.path().join("demo.json"), r#"{"build":"one"}"#).unwrap();
        assert_eq!(Inputs::read(dir.path()).unwrap().build, "one");
        fs::write(dir.path().join("paths.json"), r#"{"build":"two"}"#).unwrap();
        let error = Inputs::read(dir.path()).err().unwrap().to_string();
        assert!(
            error.contains("out/demo.json of one; out/paths.json of two"),
            "{error}"
        );
    }

    #[test]
    fn figures_of_two_versions_of_a_package_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, version: &str| {
            let package = json!({ "name": "qemu", "architecture": "amd64", "version": version });
            let value = json!({ "build": "one", "packages": [package] });
            fs::write(dir.path().join(name), value.to_string()).unwrap();
        };
        write("demo.json", "11");
        write("paths.json", "11");
        assert_eq!(Inputs::read(dir.path()).unwrap().build, "one");
        write("paths.json", "12");
        let error = format!("{:#}", Inputs::read(dir.path()).err().unwrap());
        assert!(error.contains("qemu:amd64 11 and with 12"), "{error}");
    }
}
