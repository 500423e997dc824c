// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this project ships for Prometheus and Grafana, judged by their own tools: the alert rules by
//! Debian's promtool, the dashboard by Grafana's schema, a package of npm with types for TypeScript.
//!
//! ```text
//! vcpufreq-rules.yml, rules-test.yml ─▶ promtool check rules, test rules
//! grafana.json, as a constant of the type Dashboard ─▶ tsc
//! ```
//! And Prometheus itself for the host of the scenario `metrics`, with what that scrapes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::check_cache::{Check, CheckPlace};
use crate::child_output;
use crate::initramfs::Initramfs;
use crate::kernel::ModuleSource;
use crate::packages;
use crate::progress::Step;
use crate::root::Root;
use crate::verdict::TestResult;
use crate::{debian, systemd};

const PROMETHEUS: &str = "bin/prometheus";
/// Below `docs/examples`: where the host has them.
const UNITS: [&str; 2] = ["vcpufreq-metrics.socket", "vcpufreq-metrics@.service"];
const SETTINGS: [&str; 2] = ["prometheus.yml", "vcpufreq-rules.yml"];

const TOOLS: [&str; 3] = ["node-typescript", "npm", "prometheus"];
/// Version that the dashboard was written for; a newer one may have other types.
const SCHEMA: &str = "@grafana/schema@13.2.3";
const EXAMPLES: ModuleSource = ModuleSource {
    name: "monitoring",
    folders: &["docs/examples", "lab/monitoring"],
};

/// Where the tree has it, and what fetches it there.
const FOLDER: &str = "schema";
const NPM: [&str; 8] = [
    "/usr/bin/node",
    "/usr/share/nodejs/npm/bin/npm-cli.js",
    "install",
    "--prefix=/schema",
    "--ignore-scripts",
    "--no-audit",
    "--no-fund",
    SCHEMA,
];
/// Judges the dashboard by the schema that the tree $1 has. Debian's node has parts of its own in
/// /usr/share.
const JUDGE: &str = r#"
    mount --bind "$1/usr/share" /usr/share
    mkdir /tmp/dashboard
    cd /tmp/dashboard
    ln -s "$1/schema/node_modules" .
    {
        echo "import type { Dashboard } from '@grafana/schema';"
        echo 'export const dashboard: Dashboard ='
        cat /src/docs/examples/grafana.json
    } >dashboard.ts
    "$1/usr/bin/node" /usr/share/nodejs/typescript/lib/tsc.js --noEmit --strict --skipLibCheck \
        --module node16 --moduleResolution node16 dashboard.ts
"#;

/// Carries the checks out.
pub fn checks(cache: &Cache, root: &Root, repo: &Path) -> Result<Vec<TestResult>> {
    let tree = root.inside(&tools(cache, root)?)?;
    let promtool = format!("{tree}/usr/bin/promtool");
    let rules = "docs/examples/vcpufreq-rules.yml";
    let config = "docs/examples/prometheus.yml";
    let checks = [
        (
            "promtool check config",
            vec![&*promtool, "check", "config", config],
        ),
        (
            "promtool check rules",
            vec![&promtool, "check", "rules", rules],
        ),
        (
            "promtool test rules",
            vec![&promtool, "test", "rules", "lab/monitoring/rules-test.yml"],
        ),
        (
            "dashboard by the schema of Grafana",
            vec!["sh", "-ec", JUDGE, "sh", &tree],
        ),
    ];
    // The tree's programs are of the root's release, and run with their own libraries.
    let libraries = format!("LD_LIBRARY_PATH={tree}/usr/lib/x86_64-linux-gnu");
    let tried = checks.into_iter().map(|(name, words)| {
        let check = Check {
            name: name.replace(' ', "-"),
            source: EXAMPLES,
            needs: Vec::new(),
            command: words.into_iter().map(str::to_owned).collect(),
            place: CheckPlace::Checkout(vec![libraries.clone()]),
        };
        check.tried(name.to_owned(), (cache, root), repo)
    });
    Ok(tried.collect())
}

/// The tree of the tools, with Grafana's schema.
fn tools(cache: &Cache, root: &Root) -> Result<PathBuf> {
    let list = TOOLS.join(",");
    let id = root.id();
    let npm = NPM.join(" ");
    let parts = [&*id, &list, &npm].map(str::as_bytes);
    let dir = cache.entry("monitoring", &key(parts), |to| {
        let place = (Arch::X86_64, "promtool, npm (about 105 MB to fetch)");
        packages::unpack(root, to, place, &TOOLS, &[])?;
        let step = Step::start(SCHEMA);
        let tree = to.join("tree");
        fs::create_dir(tree.join(FOLDER))?;
        let (installed, text) = child_output::output(packages::online(&tree).args(NPM))?;
        ensure!(
            installed,
            "cannot fetch {SCHEMA} from npm's registry (is the network up?): {text}"
        );
        step.done();
        Ok(())
    })?;
    Ok(dir.join("tree"))
}

/// Adds Prometheus, its settings and the units that it scrapes to a host's initial file system.
pub fn add(archive: &mut Initramfs, (cache, root): (&Cache, &Root), repo: &Path) -> Result<()> {
    let place = (Arch::Arm64, "prometheus");
    let usr = packages::unpacked(cache, root, place, &["prometheus"])?.join("usr");
    debian::add(archive, root, (Arch::Arm64, Some(&usr)), &[PROMETHEUS])?;
    let examples = repo.join("docs/examples");
    let units = UNITS.map(|name| (systemd::UNITS, name));
    let settings = SETTINGS.map(|name| ("etc/prometheus", name));
    for (folder, name) in units.into_iter().chain(settings) {
        let path = examples.join(name);
        let text = fs::read(&path).with_context(|| path.display().to_string())?;
        archive.file(&format!("{folder}/{name}"), &text)?;
    }
    Ok(())
}
