// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the C code: compiler, sparse and checkpatch on the kernel modules for each kernel, the
//! modules as packages, sparse and checkpatch on the BPF programs, the guest driver's own tests,
//! and the register headers as plain C.
//!
//! They run on copies, and aren't repeated on the same input.

use std::path::Path;

use anyhow::Result;

use crate::arch::Arch;
use crate::artifacts::Artifacts;
use crate::check_cache::{Check, CheckPlace};
use crate::choice::RootPart;
use crate::kernel::{Flavor, Kernel, ModuleSource};
use crate::kernel_source;
use crate::known::KnownVersions;
use crate::progress::above;
use crate::unfetched::Unfetched;
use crate::verdict::{TestResult, Verdict, tell};

const GUEST_DRIVER: ModuleSource = ModuleSource {
    name: "guest-driver",
    folders: &["guest-driver", "abi", "module.mk"],
};
const LAB_MODULES: ModuleSource = ModuleSource {
    name: "lab-modules",
    // The last has what sparse needs to know.
    folders: &["lab/modules", "module.mk", "guest-driver/tests"],
};
const HOST_MODULE: ModuleSource = ModuleSource {
    name: "host-module",
    folders: &[
        "host-bpf/module",
        "abi",
        "module.mk",
        "guest-driver/empty",
        "guest-driver/tests",
    ],
};
const RT_MODULE: ModuleSource = ModuleSource {
    name: "rt-module",
    folders: &[
        "rt/module",
        "module.mk",
        "guest-driver/empty",
        "guest-driver/tests",
    ],
};
const MODULES: ModuleSource = ModuleSource {
    name: "modules",
    folders: &[
        "guest-driver",
        "host-bpf/module",
        "rt/module",
        "lab/modules",
    ],
};
const BPF: ModuleSource = ModuleSource {
    name: "bpf",
    // The second has the registers, which the programs include.
    folders: &["host-bpf/bpf", "abi"],
};
const ABI: ModuleSource = ModuleSource {
    name: "abi",
    folders: &["abi"],
};

/// Includes the headers twice and uses each of their values, without a library's
/// headers; with no value found, `-pedantic` warns of the empty file. $2 makes warnings errors.
const ABI_SCRIPT: &str = r#"
    for header in vcpufreq-abi.h vcpufreq-shm.h; do
        {
            printf '#include "%s"\n' "$header" "$header"
            sed -nE 's/^#define[ \t]+([A-Z0-9_]+)[ \t]+[^ \t].*/enum { use_\1 = sizeof(\1) };/p' \
                "abi/$header"
        } > use.c
        clang --target="$1" -ffreestanding -nostdinc -Iabi -std=c89 -pedantic \
            -Wall -Wextra $2 -fsyntax-only use.c
    done
"#;

/// Makes a package, and has DKMS build it for a kernel as an installed system
/// would: by the lines of dkms.conf alone. DKMS keeps the module, which has to
/// bear the name that dkms.conf gives it, and not to be the empty one.
const DKMS_SCRIPT: &str = r#"
    value() { sed -n "s/^$1=\"\(.*\)\"\$/\1/p" "$folder/dkms.conf"; }
    folder=$1 release=$2
    name=$(value PACKAGE_NAME) version=$(value PACKAGE_VERSION)
    built=$(value 'BUILT_MODULE_NAME\[0\]')
    make --silent -C "$folder" dist DIST="$PWD/src/$name-$version"
    trees="--sourcetree $PWD/src --dkmstree $PWD/dkms"
    mkdir dkms
    dkms add $trees -m "$name" -v "$version"
    ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu- \
        dkms build $trees -m "$name" -v "$version" -k "$release" -a aarch64 ||
        { cat dkms/*/*/build/make.log; exit 1; }
    module=$(find dkms -path "*/$release/aarch64/module/$built.ko*")
    if modinfo -F description "$module" | grep ^Empty; then cat dkms/*/*/*/*/log/make.log; exit 1; fi
"#;

/// The kernel's patterns of defects, as its coccicheck reports them. Each file has its options. Two
/// need a compiler of OCaml.
const COCCI_SCRIPT: &str = r#"
    patterns=$(grep -rl '^virtual report' "$1" | xargs grep -L 'script:ocaml' | sort)
    [ -n "$patterns" ] || { echo "no patterns in $1"; exit 1; }
    for pattern in $patterns; do
        options=$(sed -n 's,^// Options:,,p' "$pattern")
        spatch -D report --very-quiet $options --cocci-file "$pattern" --dir . ||
            echo "$pattern: spatch failed"
    done > ../found 2> ../errors
    if grep . ../found; then
        cat ../errors
        exit 1
    fi
"#;

/// The modules' packages, built by DKMS for these kernels.
pub fn packages(artifacts: &Artifacts, repo: &Path, flavors: &[Flavor]) -> Result<Vec<TestResult>> {
    let mut tried = Vec::new();
    for &flavor in flavors {
        if let Some(why) = flavor
            .part(Arch::Arm64)
            .and_then(|part| artifacts.root.lacks(part))
        {
            tried.push(TestResult::skipped(format!("packages for {flavor:?}"), why));
            continue;
        }
        let release = Kernel::find(&artifacts.root, flavor)?.release;
        for source in [GUEST_DRIVER, HOST_MODULE, RT_MODULE] {
            let check = dkms(source, &release);
            let name = format!("{}: make dist, DKMS, {release}", source.name);
            tried.push(check.tried(name, artifacts.tools(), repo));
        }
    }
    tried.iter().for_each(tell);
    Ok(tried)
}

/// Every test of the C code that the short set has.
pub fn all(artifacts: &Artifacts, repo: &Path) -> Result<Vec<TestResult>> {
    let source = kernel_source::unpacked(&artifacts.cache, &artifacts.root);
    let scripts = match source {
        Ok(source) => format!("{}/scripts", artifacts.root.inside(&source)?),
        // What needs them is skipped.
        Err(error) if error.is::<Unfetched>() => String::new(),
        Err(error) => return Err(error),
    };
    let checkpatch = format!("CHECKPATCH={scripts}/checkpatch.pl");
    let source = artifacts.root.source_package();
    let checks_need = [&*source, "perl:amd64", "sparse:amd64"];
    let known = KnownVersions::read(repo)?;
    let is_known = known.has_kernel(artifacts.root.kernel());
    let mut tried = Vec::new();
    // The findings of sparse and checkpatch do not depend on the release much.
    for flavor in [Flavor::Standard, Flavor::Rt] {
        if let Some(why) = flavor
            .part(Arch::Arm64)
            .and_then(|part| artifacts.root.lacks(part))
        {
            tried.push(TestResult::skipped(format!("modules for {flavor:?}"), why));
            continue;
        }
        let release = Kernel::find(&artifacts.root, flavor)?.release;
        for source in [GUEST_DRIVER, LAB_MODULES, HOST_MODULE, RT_MODULE] {
            let check = make("check", source, &release, &[&checkpatch]).needing(&checks_need);
            let name = format!("{}: W=1, sparse, checkpatch, {release}", source.name);
            let one = check.tried(name, artifacts.tools(), repo);
            tried.extend(with_kernels_tools(one, is_known));
        }
    }
    let name = "host-bpf: sparse, checkpatch".to_owned();
    let of_bpf = bpf("check", &checkpatch).needing(&checks_need);
    let of_bpf = of_bpf.tried(name, artifacts.tools(), repo);
    tried.extend(with_kernels_tools(of_bpf, is_known));
    let name = "host-bpf: no warning of clang".to_owned();
    let of_clang = bpf("warnings", "OUT=/tmp").tried(name, artifacts.tools(), repo);
    let has_clang = known.has_clang(&artifacts.root)?;
    tried.extend(with_tools(of_clang, "clang", has_clang));
    for machine in ["aarch64-linux-gnu", "x86_64-linux-gnu"] {
        let name = format!("abi: the headers are C for {machine}");
        tried.push(abi(machine, has_clang).tried(name, artifacts.tools(), repo));
    }
    let name = "modules: coccicheck".to_owned();
    let needs = [&*source, "coccinelle:amd64", "libpython3-dev:amd64"];
    let semantic = coccicheck(&scripts).needing(&needs);
    let semantic = semantic.tried(name, artifacts.tools(), repo);
    tried.extend(with_kernels_tools(semantic, is_known));
    tried.extend(driver_tests(artifacts, repo, is_known)?);
    tried.iter().for_each(tell);
    // The oldest that the modules are for: by the others they were built above.
    tried.extend(packages(artifacts, repo, &[Flavor::Old])?);
    Ok(tried)
}

/// What was found with the kernel's own scripts and headers: a new kernel's find more, which is shown
/// and decides nothing.
fn with_kernels_tools(tried: TestResult, is_known: bool) -> Option<TestResult> {
    with_tools(tried, "kernel", is_known)
}

/// The same of any tool of this name.
fn with_tools(tried: TestResult, tool: &str, is_known: bool) -> Option<TestResult> {
    match &tried.verdict {
        Verdict::Failed(found) if !is_known => {
            above(|| {
                println!("{}", found.trim_end());
                let name = &tried.name;
                println!("note     {name}: it decides nothing with this {tool} (lab/known.toml)");
            });
            None
        }
        _ => Some(tried),
    }
}

/// The guest driver on emulated guests, with memory or a module as host. With a kernel that isn't known
/// warnings are no errors.
fn driver_tests(artifacts: &Artifacts, repo: &Path, is_known: bool) -> Result<Vec<TestResult>> {
    let release = Kernel::find(&artifacts.root, Flavor::Standard)?.release;
    // In memory, and gone with the command.
    const MO: &str = "MO=/tmp/out";
    let kernel = format!("KERNEL=/boot/vmlinuz-{release}");
    let strict = match is_known {
        true => "strict=W=1 KCFLAGS=-Werror",
        false => "strict=",
    };
    let mut tried = driver_test(
        make("test", GUEST_DRIVER, &release, &[&kernel, MO, strict]),
        artifacts,
        repo,
    );
    if let Some(why) = artifacts.root.lacks(RootPart::X86Guest) {
        tried.push(TestResult::skipped("guest-driver: guests for x86-64", why));
        return Ok(tried);
    }
    let release = release.replace("-arm64", "-amd64");
    let kernel = format!("KERNEL=/opt/amd64/vmlinuz-{release}");
    let mut native = vec!["ARCH=x86", "CROSS_COMPILE=", &kernel, MO];
    if is_known {
        native.extend(["W=1", "KCFLAGS=-Werror"]);
    }
    let check = make("test-x86_64", GUEST_DRIVER, &release, &native);
    tried.extend(driver_test(check, artifacts, repo));
    Ok(tried)
}

fn driver_test(check: Check, artifacts: &Artifacts, repo: &Path) -> Vec<TestResult> {
    let result = check.carry_out(artifacts.tools(), repo);
    let (text, passed) = match &result {
        Ok(held) => (held.text.clone(), held.verdict()),
        Err(error) => (format!("{error:#}"), Verdict::Passed),
    };
    let mut tried = results(&text, &passed);
    let failed = |one: &TestResult| matches!(one.verdict, Verdict::Failed(_));
    if tried.is_empty() || (result.is_err() && !tried.iter().any(failed)) {
        tried.push(TestResult::new(
            format!("guest-driver: {}", check.name),
            false,
            || text,
        ));
    }
    tried
}

/// Reads `NAME (3 s): ok`, which is `passed`, and `NAME (3 s): FAILED` with
/// why in the lines that follow.
fn results(text: &str, passed: &Verdict) -> Vec<TestResult> {
    let mut tried: Vec<TestResult> = Vec::new();
    for line in text.lines() {
        let ended = line.rsplit_once(" s): ");
        let named = ended.and_then(|(front, end)| Some((front.rsplit_once(" (")?.0, end)));
        let verdict = match named {
            Some((_, "ok")) => passed.clone(),
            Some((_, "FAILED")) => Verdict::Failed(String::new()),
            _ => {
                if let Some(Verdict::Failed(why)) = tried.last_mut().map(|one| &mut one.verdict) {
                    why.push('\n');
                    why.push_str(line);
                }
                continue;
            }
        };
        let name = named.map_or("", |(name, _)| name);
        tried.push(TestResult {
            name: format!("guest-driver: {name}"),
            verdict,
        });
    }
    tried
}

fn dkms(source: ModuleSource, release: &str) -> Check {
    let folder = source.folders.first().copied().unwrap_or_default();
    let command = ["sh", "-ec", DKMS_SCRIPT, "sh", folder, release];
    Check {
        name: format!("{}-dkms-{release}", source.name),
        source,
        needs: vec!["dkms:amd64".to_owned()],
        command: command.map(Into::into).into(),
        place: CheckPlace::Copy,
    }
}

/// The register headers as C for a machine; with `strict` a warning is an error.
fn abi(machine: &str, strict: bool) -> Check {
    let strict = if strict { "-Werror" } else { "" };
    let command = ["sh", "-ec", ABI_SCRIPT, "sh", machine, strict];
    Check {
        name: format!("abi-{machine}"),
        source: ABI,
        needs: Vec::new(),
        command: command.map(Into::into).into(),
        place: CheckPlace::Copy,
    }
}

fn bpf(target: &str, setting: &str) -> Check {
    let command = ["make", "--silent", "-C", "host-bpf/bpf", target, setting];
    Check {
        name: format!("bpf-{target}"),
        source: BPF,
        needs: Vec::new(),
        command: command.map(Into::into).into(),
        place: CheckPlace::Copy,
    }
}

fn coccicheck(scripts: &str) -> Check {
    let patterns = format!("{scripts}/coccinelle");
    let command = ["sh", "-ec", COCCI_SCRIPT, "sh", &patterns];
    Check {
        name: "coccicheck".to_owned(),
        source: MODULES,
        needs: Vec::new(),
        command: command.map(Into::into).into(),
        place: CheckPlace::Copy,
    }
}

/// A target of the makefile in the first of the source's folders.
fn make(target: &str, source: ModuleSource, release: &str, variables: &[&str]) -> Check {
    let folder = source.folders.first().copied().unwrap_or_default();
    let mut command = ["make", "--silent", "-C", folder, target]
        .map(String::from)
        .to_vec();
    command.extend([
        format!("KDIR=/usr/src/linux-headers-{release}"),
        "ARCH=arm64".to_owned(),
        "CROSS_COMPILE=aarch64-linux-gnu-".to_owned(),
    ]);
    command.extend(variables.iter().map(|&variable| variable.to_owned()));
    Check {
        name: format!("{}-{target}-{release}", source.name),
        source,
        needs: Vec::new(),
        command,
        place: CheckPlace::Copy,
    }
}

#[cfg(test)]
mod tests {
    //! Promises: what the driver's tests printed is counted as what it was; what tools find that aren't
    //! known decides nothing, and compilers' warnings are errors with known ones alone.
    use super::*;

    #[test]
    fn what_an_unknown_tool_finds_decides_nothing() {
        let all = [
            Verdict::Passed,
            Verdict::Failed("warning: new".to_owned()),
            Verdict::Skipped("sparse:amd64: trixie lacks it".to_owned()),
        ];
        let decides = |verdict: &Verdict, is_known| {
            let name = "abi".to_owned();
            let verdict = verdict.clone();
            with_kernels_tools(TestResult { name, verdict }, is_known).map(|one| one.verdict)
        };
        for verdict in &all {
            assert_eq!(decides(verdict, true).as_ref(), Some(verdict));
            let unknown = Some(verdict).filter(|one| !matches!(one, Verdict::Failed(_)));
            assert_eq!(decides(verdict, false).as_ref(), unknown);
        }
    }

    /// By a stand-in for clang, which warns.
    #[test]
    fn the_headers_warnings_are_errors_with_a_known_compiler() {
        let dir = std::env::temp_dir().join(format!("vcpufreq-abi-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("abi")).unwrap();
        for header in ["vcpufreq-abi.h", "vcpufreq-shm.h"] {
            std::fs::write(dir.join("abi").join(header), "#define A 1\n").unwrap();
        }
        let clang = "clang() { case \" $* \" in *' -Werror '*) return 1 ;; esac; }\n";
        for strict in [true, false] {
            let command = abi("aarch64-linux-gnu", strict).command;
            let script = format!("{clang}{}", command[2]);
            let mut run = std::process::Command::new("sh");
            run.args(["-ec", &script]).args(&command[3..]);
            let status = run.current_dir(&dir).status().unwrap();
            assert_eq!(status.success(), !strict);
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn driver_tests_are_told_apart() {
        let text = "make: noise\nfirst one (4 s): ok\nsecond (0 s): FAILED\nTraceback\n  why\n\
                    third (36 s): ok\n3 tests, 1 failed, 0 skipped\n";
        let tried: Vec<(String, Verdict)> = results(text, &Verdict::Kept)
            .into_iter()
            .map(|one| (one.name, one.verdict))
            .collect();
        let expected = [
            ("guest-driver: first one", Verdict::Kept),
            (
                "guest-driver: second",
                Verdict::Failed("\nTraceback\n  why".into()),
            ),
            ("guest-driver: third", Verdict::Kept),
        ];
        assert_eq!(
            tried,
            expected.map(|(name, verdict)| (name.to_owned(), verdict))
        );
    }
}
