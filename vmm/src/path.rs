// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The paths that a guest's accesses can take, which of them a host offers for
//! a guest, and which one is taken. Pure but for [`offer_bpf`]: what the host can do comes in as
//! [`PathFacts`].

use std::fmt;

use serde::{Deserialize, Serialize};

use vcpufreq_vm::probe::PathFacts;

/// How an access of the guest reaches the device, the best last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// Each access exits to the VMM.
    #[default]
    Exit,
    /// Memory that the guest shares, with a doorbell for its requests: of `serve` and `qemu`, or
    /// for a guest that has the project's driver.
    Shm,
    /// Memory in the place of the registers or in the guest's RAM: requests are stores, which a
    /// thread reads.
    Ram,
    /// Reads from memory, writes by ioeventfd.
    Ioeventfd,
    /// Reads from memory that BPF keeps true, writes handled by BPF.
    Bpf,
}

/// The path in the user's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PathChoice {
    /// The best that the host offers.
    #[default]
    Auto,
    /// Each access exits to the VMM.
    Exit,
    /// Reads from memory, writes finished by KVM.
    Ioeventfd,
    /// Reads and writes handled by BPF in the kernel.
    Bpf,
    /// Memory that the guest shares; needs the guest driver of this project.
    Shm,
    /// Memory in the place of the registers; nothing exits, and requests are read each ms.
    Ram,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exit => "exit",
            Self::Ioeventfd => "ioeventfd",
            Self::Bpf => "bpf",
            Self::Shm => "shm",
            Self::Ram => "ram",
        })
    }
}

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// What is missing, and what to do about it.
#[cfg(feature = "bpf")]
pub fn offer_bpf() -> Result<String, String> {
    vcpufreq_host_bpf::offer()
}

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// Always: this program is built without BPF.
#[cfg(not(feature = "bpf"))]
pub fn offer_bpf() -> Result<String, String> {
    Err("this program is built without BPF; build it without --no-default-features".to_owned())
}

/// Whether the service of --actuator scx runs.
///
/// # Errors
/// Why it can't be used, and what to do about it.
#[cfg(feature = "bpf")]
pub fn check_scx() -> Result<(), String> {
    let pins = vcpufreq_host_bpf::ScxPins::open();
    pins.map(drop).map_err(|error| error.to_string())
}

/// Whether the service of --actuator scx runs.
///
/// # Errors
/// Always: this program is built without BPF.
#[cfg(not(feature = "bpf"))]
pub fn check_scx() -> Result<(), String> {
    offer_bpf().map(drop)
}

/// What a guest needs of the host for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// vCPUs.
    pub vcpus: u64,
    /// Entries of all vCPUs' tables together, of those that have one.
    pub entries: u64,
    /// Performance domains.
    pub domains: u64,
    /// pCPUs of the host, whose frequencies are kept open.
    pub pcpus: u64,
}

impl Needs {
    /// Open files that the path `ioeventfd` takes: an eventfd for each entry, an epoll set for each
    /// domain, two perf events for each vCPU and one for each pCPU. The VMM's other open files: for
    /// each vCPU the vCPU, its thread's stat and two clamp files; for each pCPU its frequency and
    /// its hotplug file; and under 64 more.
    pub fn open_files(&self) -> u64 {
        self.entries + self.domains + 6 * self.vcpus + 3 * self.pcpus + 64
    }
}

impl Needs {
    fn are_within(&self, open_files: u64, with: &str) -> Result<(), String> {
        let needed = self.open_files();
        if needed <= open_files {
            return Ok(());
        }
        Err(format!(
            "{} vCPUs{with} take {needed} open files, and the limit is {open_files}; raise it \
             (ulimit -Hn {needed}, or LimitNOFILE={needed} of the unit)",
            self.vcpus
        ))
    }
}

/// A path, and why it is possible or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// Which one.
    pub path: Path,
    /// How it works here, or why it doesn't and what to do about it.
    pub possible: Result<String, String>,
}

/// What the host offers, the best first. `bpf` is how BPF would work here;
/// `open_files` is the limit of them.
pub fn offers(
    bpf: Result<String, String>,
    facts: &Result<PathFacts, String>,
    needs: &Needs,
    open_files: u64,
) -> Vec<Offer> {
    let (ioeventfd, in_kvm) = match facts {
        Ok(facts) => (ioeventfd(facts, needs, open_files), bpf_in_kvm(facts)),
        Err(why) => (Err(why.clone()), Err(why.clone())),
    };
    let bpf = bpf.and_then(|how| in_kvm.map(|()| how));
    let shm = facts.clone();
    let shm = shm.and_then(|facts| shm_path(&facts, needs, open_files));
    let ram = facts.clone();
    let ram = ram.and_then(|facts| ram_path(&facts, needs, open_files));
    let exit = Ok("each access exits to the VMM; every host has it".to_owned());
    [
        (Path::Bpf, bpf),
        (Path::Ioeventfd, ioeventfd),
        (Path::Ram, ram),
        (Path::Shm, shm),
        (Path::Exit, exit),
    ]
    .map(|(path, possible)| Offer { path, possible })
    .into()
}

/// What the path `bpf` needs of KVM.
fn bpf_in_kvm(facts: &PathFacts) -> Result<(), String> {
    if facts.protected {
        return Err("a protected guest's memory can't be a BPF map's; leave --path out".to_owned());
    }
    in_kvm(facts)?;
    match facts.coherent {
        true => Ok(()),
        false => Err(
            "a guest's reads go past the host's caches (no FEAT_S2FWB), which BPF can't clean; \
             take --path ioeventfd"
                .to_owned(),
        ),
    }
}

fn in_kvm(facts: &PathFacts) -> Result<(), String> {
    facts.readonly_slots.clone().map_err(|why| {
        format!("{why}, as for a protected VM; use a host that isn't in protected mode")
    })?;
    ioeventfds(facts)
}

fn ioeventfds(facts: &PathFacts) -> Result<(), String> {
    facts
        .ioeventfds
        .clone()
        .map_err(|why| format!("{why}; use a kernel with CONFIG_EVENTFD and KVM's ioeventfds"))
}

fn ioeventfd(facts: &PathFacts, needs: &Needs, open_files: u64) -> Result<String, String> {
    match facts.protected {
        true => ioeventfds(facts)?,
        false => in_kvm(facts)?,
    }
    let with = format!(" with {} table entries", needs.entries);
    needs.are_within(open_files, &with)?;
    let reads = match (facts.protected, facts.coherent) {
        (true, _) => "reads from memory that vcpufreq_guest shares, or by exits",
        (false, true) => "reads from memory",
        (false, false) => {
            "reads from memory, whose cache lines are cleaned after each store (no FEAT_S2FWB)"
        }
    };
    let writes = match needs.entries {
        0 => "requests exit to the VMM, for no vCPU has a table".to_owned(),
        entries => format!("requests by {entries} ioeventfds"),
    };
    Ok(format!("{reads}; {writes}"))
}

/// Any guest memory may be shared: it needs no read-only slots, and no cache is in the way.
fn shm_path(facts: &PathFacts, needs: &Needs, open_files: u64) -> Result<String, String> {
    ioeventfds(facts)?;
    if facts.protected {
        let why = "a protected guest has no memory of its VMM's; leave --path out";
        return Err(why.to_owned());
    }
    // An eventfd that rings and its copy in KVM, in the place of the entries'.
    let entries = 2 * needs.vcpus;
    Needs { entries, ..*needs }.are_within(open_files, "")?;
    Ok(format!(
        "reads from memory; requests by {} ioeventfds; the guest needs vcpufreq_guest",
        needs.vcpus
    ))
}

/// Registers that are memory: what the guest stores is in the host's caches or is not seen.
fn ram_path(facts: &PathFacts, needs: &Needs, open_files: u64) -> Result<String, String> {
    if facts.protected {
        let why = "a protected guest has no memory of its VMM's; leave --path out";
        return Err(why.to_owned());
    }
    if !facts.coherent {
        let why = "a guest's stores go past the host's caches (no FEAT_S2FWB); leave --path out";
        return Err(why.to_owned());
    }
    Needs {
        entries: 0,
        ..*needs
    }
    .are_within(open_files, "")?;
    Ok("reads from memory; requests are stores, which a thread reads each ms".to_owned())
}

/// The path to use: the requested one, or else the best.
///
/// # Errors
/// Why the requested path isn't possible.
pub fn choose(choice: PathChoice, offers: &[Offer]) -> Result<Path, String> {
    let wanted = match choice {
        PathChoice::Auto => None,
        PathChoice::Exit => Some(Path::Exit),
        PathChoice::Ioeventfd => Some(Path::Ioeventfd),
        PathChoice::Bpf => Some(Path::Bpf),
        PathChoice::Shm => Some(Path::Shm),
        PathChoice::Ram => Some(Path::Ram),
    };
    let Some(wanted) = wanted else {
        // Linux' own driver doesn't know shared memory; requests in RAM are late, and have no table.
        let mut any = offers.iter().filter(|offer| !is_by_name_only(offer.path));
        let best = any.find(|offer| offer.possible.is_ok());
        return Ok(best.map_or(Path::Exit, |offer| offer.path));
    };
    let offer = offers.iter().find(|offer| offer.path == wanted);
    match offer.map(|offer| &offer.possible) {
        Some(Err(why)) => Err(format!("--path {wanted} isn't possible: {why}")),
        Some(Ok(_)) | None => Ok(wanted),
    }
}

/// Whether a path is taken only if the user names it.
pub fn is_by_name_only(path: Path) -> bool {
    matches!(path, Path::Shm | Path::Ram)
}

/// A line on why a better path than this one isn't possible, if so. Those [taken by name](is_by_name_only)
/// are no better.
pub fn why_no_better(offers: &[Offer], taken: Path) -> Option<String> {
    let (text, better) = match taken {
        Path::Exit => ("each access exits to the VMM", Path::Ioeventfd),
        Path::Ioeventfd => ("the path is ioeventfd, not bpf", Path::Bpf),
        Path::Bpf | Path::Shm | Path::Ram => return None,
    };
    let offer = offers.iter().find(|offer| offer.path == better)?;
    let why = offer.possible.as_ref().err()?;
    Some(format!("{text}: {why}"))
}

/// A line on why guests of `demo` and `bench` don't take the path `bpf`, if so; without one where
/// another path was named.
pub fn without_bpf(choice: &str, bpf: Result<String, String>) -> Option<String> {
    let why = bpf.err().filter(|_| choice == "auto")?;
    Some(format!("guests go without the path bpf: {why}"))
}

/// A line for each path, the best first.
pub fn explain(offers: &[Offer], taken: Path) -> String {
    let lines = offers.iter().map(|Offer { path, possible }| {
        let (word, text) = match possible {
            Ok(how) if *path == taken => ("taken", how),
            Ok(how) => ("possible", how),
            Err(why) => ("not possible", why),
        };
        format!("path {path}: {word}: {text}")
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    //! The best path that the host offers is taken, or the one asked for; a
    //! path that isn't offered gives the reason, and the next step.
    use super::*;

    const NEEDS: Needs = Needs {
        vcpus: 64,
        entries: 1024,
        domains: 64,
        pcpus: 8,
    };

    fn no_bpf() -> Result<String, String> {
        Err("this program is built without BPF".to_owned())
    }

    fn facts() -> PathFacts {
        PathFacts {
            readonly_slots: Ok(()),
            ioeventfds: Ok(()),
            coherent: true,
            protected: false,
        }
    }

    fn why_no_ioeventfd(facts: Result<PathFacts, String>, open_files: u64) -> String {
        let offers = offers(no_bpf(), &facts, &NEEDS, open_files);
        assert_eq!(choose(PathChoice::Auto, &offers), Ok(Path::Exit));
        choose(PathChoice::Ioeventfd, &offers).unwrap_err()
    }

    #[test]
    fn demo_and_bench_name_why_there_is_no_bpf() {
        let line = without_bpf("auto", no_bpf()).unwrap();
        assert!(line.ends_with("bpf: this program is built without BPF"));
        assert_eq!(line.lines().count(), 1);
        assert_eq!(without_bpf("ioeventfd", no_bpf()), None);
        assert_eq!(without_bpf("auto", Ok(String::new())), None);
    }

    #[test]
    fn the_best_offer_is_taken_unless_another_is_asked_for() {
        let offers = offers(no_bpf(), &Ok(facts()), &NEEDS, 65_536);
        assert_eq!(choose(PathChoice::Auto, &offers), Ok(Path::Ioeventfd));
        assert_eq!(choose(PathChoice::Exit, &offers), Ok(Path::Exit));
        assert!(choose(PathChoice::Bpf, &offers).is_err());
        let text = explain(&offers, Path::Ioeventfd);
        assert_eq!(text.lines().count(), 5);
        assert!(text.contains("path ioeventfd: taken: reads from memory; requests by 1024"));
    }

    #[test]
    fn a_lesser_path_than_the_best_says_why() {
        let refused = PathFacts {
            readonly_slots: Err("refused".into()),
            ..facts()
        };
        let how = || Ok("by programs".to_owned());
        for (bpf, facts, wanted) in [
            (how(), facts(), None),
            (no_bpf(), facts(), Some("not bpf: this program is built")),
            (how(), refused, Some("exits to the VMM: refused")),
        ] {
            let offers = offers(bpf, &Ok(facts), &NEEDS, 65_536);
            let taken = choose(PathChoice::Auto, &offers).unwrap();
            let line = why_no_better(&offers, taken);
            assert_eq!(line.is_some(), wanted.is_some(), "{line:?}");
            let line = line.unwrap_or_default();
            assert!(line.contains(wanted.unwrap_or_default()), "{line}");
        }
    }

    #[test]
    fn what_is_not_offered_says_why() {
        let refused = PathFacts {
            readonly_slots: Err("refused".into()),
            ..facts()
        };
        assert!(why_no_ioeventfd(Ok(refused), 65_536).contains("refused, as for a protected VM"));
        let without = PathFacts {
            ioeventfds: Err("none".into()),
            ..facts()
        };
        assert!(why_no_ioeventfd(Ok(without), 65_536).contains("none; use a kernel with"));
        assert!(why_no_ioeventfd(Err("no KVM".into()), 65_536).contains("no KVM"));
    }

    #[test]
    fn the_limit_of_open_files_is_kept() {
        let needed = NEEDS.open_files();
        let why = why_no_ioeventfd(Ok(facts()), needed - 1);
        assert!(why.contains("64 vCPUs with 1024 table entries"), "{why}");
        assert!(why.contains(&format!("ulimit -Hn {needed}")), "{why}");
        let offers = offers(no_bpf(), &Ok(facts()), &NEEDS, needed);
        assert_eq!(choose(PathChoice::Auto, &offers), Ok(Path::Ioeventfd));
    }

    #[test]
    fn shared_memory_is_taken_on_request_alone() {
        // As in a protected VM, and on a CPU without FEAT_S2FWB.
        let facts = PathFacts {
            readonly_slots: Err("refused".into()),
            coherent: false,
            ..facts()
        };
        let needed = 8 * NEEDS.vcpus + NEEDS.domains + 3 * NEEDS.pcpus + 64;
        let of = |facts, files| offers(no_bpf(), &facts, &NEEDS, files);
        let enough = of(Ok(facts.clone()), needed);
        assert_eq!(choose(PathChoice::Shm, &enough), Ok(Path::Shm));
        assert_eq!(choose(PathChoice::Auto, &enough), Ok(Path::Exit));
        let why = choose(PathChoice::Shm, &of(Ok(facts), needed - 1)).unwrap_err();
        assert!(why.contains("64 vCPUs take 664 open files"), "{why}");
        let without = PathFacts {
            ioeventfds: Err("none".into()),
            ..self::facts()
        };
        let why = choose(PathChoice::Shm, &of(Ok(without), 65_536)).unwrap_err();
        assert!(why.contains("none; use a kernel with"), "{why}");
    }

    #[test]
    fn registers_in_memory_want_coherent_caches_and_no_ioeventfds() {
        let facts = PathFacts {
            ioeventfds: Err("none".into()),
            ..facts()
        };
        let needed = 6 * NEEDS.vcpus + NEEDS.domains + 3 * NEEDS.pcpus + 64;
        let of = |facts, files| offers(no_bpf(), &Ok(facts), &NEEDS, files);
        let enough = of(facts.clone(), needed);
        assert_eq!(choose(PathChoice::Ram, &enough), Ok(Path::Ram));
        assert_eq!(choose(PathChoice::Auto, &enough), Ok(Path::Exit));
        let why = choose(PathChoice::Ram, &of(facts.clone(), needed - 1)).unwrap_err();
        assert!(why.contains("ulimit -Hn"), "{why}");
        let coherent = false;
        let past = of(PathFacts { coherent, ..facts }, needed);
        let why = choose(PathChoice::Ram, &past).unwrap_err();
        assert!(why.contains("no FEAT_S2FWB"), "{why}");
    }

    #[test]
    fn caches_that_loads_go_past_are_named() {
        let facts = PathFacts {
            coherent: false,
            ..facts()
        };
        let text = explain(
            &offers(no_bpf(), &Ok(facts), &NEEDS, 65_536),
            Path::Ioeventfd,
        );
        assert!(text.contains("no FEAT_S2FWB"), "{text}");
    }

    #[test]
    fn a_protected_guest_has_ioeventfds_without_slots() {
        let facts = PathFacts {
            readonly_slots: Err("refused".into()),
            protected: true,
            ..facts()
        };
        let how = || Ok("by programs".to_owned());
        let offers = offers(how(), &Ok(facts), &NEEDS, 65_536);
        assert_eq!(choose(PathChoice::Auto, &offers), Ok(Path::Ioeventfd));
        for path in [PathChoice::Bpf, PathChoice::Shm, PathChoice::Ram] {
            let why = choose(path, &offers).unwrap_err();
            assert!(
                why.contains("a protected guest") && why.ends_with("leave --path out"),
                "{why}"
            );
        }
    }

    #[test]
    fn bpf_is_the_best_where_caches_are_coherent() {
        let how = || Ok("by programs".to_owned());
        let best = offers(how(), &Ok(facts()), &NEEDS, 65_536);
        assert_eq!(choose(PathChoice::Auto, &best), Ok(Path::Bpf));
        let facts = PathFacts {
            coherent: false,
            ..facts()
        };
        let best = offers(how(), &Ok(facts), &NEEDS, 65_536);
        assert_eq!(choose(PathChoice::Auto, &best), Ok(Path::Ioeventfd));
        let why = choose(PathChoice::Bpf, &best).unwrap_err();
        assert!(why.contains("no FEAT_S2FWB"), "{why}");
    }
}
