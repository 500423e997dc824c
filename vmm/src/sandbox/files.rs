// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a confined thread may open: files below `/sys/devices/system/cpu`, to read. And, as far as
//! the kernel's landlock has it, no socket of the network, no abstract socket and no signal to
//! other processes.

use std::path::Path;

use anyhow::Context as _;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, Erratum,
    PathBeneath, PathFd, Ruleset, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _,
    RulesetStatus, Scope,
};

/// What stays readable: pCPUs and cpufreq drivers come and go.
const READABLE: &str = "/sys/devices/system/cpu";
/// The newest set of rights that is asked for; older kernels have less.
const NEWEST: ABI = ABI::V6;

/// The rules, and how much of them the kernel keeps.
#[derive(Debug)]
pub struct Files {
    rules: RulesetCreated,
    /// How much the kernel keeps.
    pub support: Support,
}

/// How much of the rules a kernel keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// All.
    Full,
    /// What its version has.
    Partial,
    /// Nothing: landlock isn't there.
    Missing,
}

impl Files {
    /// Asks the kernel.
    ///
    /// # Errors
    /// When the rules can't be made for another reason than a kernel without landlock.
    pub fn of_kernel() -> anyhow::Result<Self> {
        let rules = Self::rules().context("can't limit the files that the VMM may open")?;
        Ok(Self {
            rules,
            support: support()?,
        })
    }

    fn rules() -> anyhow::Result<RulesetCreated> {
        let rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(AccessNet::from_all(NEWEST))?
            .scope(scopes())?
            .create()?;
        if !Path::new(READABLE).exists() {
            return Ok(rules);
        }
        let readable = PathBeneath::new(PathFd::new(READABLE)?, AccessFs::from_read(ABI::V1));
        Ok(rules.add_rule(readable)?)
    }

    /// Limits the calling thread.
    ///
    /// # Errors
    /// As landlock_restrict_self(2).
    pub fn enter(&self) -> anyhow::Result<()> {
        self.rules.try_clone()?.restrict_self()?;
        Ok(())
    }
}

/// Sockets and signals. Kernels without a fix refuse signals between threads of one process, too: the
/// kick of a vCPU.
fn scopes() -> BitFlags<Scope> {
    match Erratum::current().contains(Erratum::ScopedSignalHandling) {
        true => Scope::from_all(NEWEST),
        false => Scope::AbstractUnixSocket.into(),
    }
}

/// A thread of its own tries it.
fn support() -> anyhow::Result<Support> {
    let tried = std::thread::spawn(|| anyhow::Ok(Files::rules()?.restrict_self()?));
    let tried = tried.join().ok().context("a thread has died")??;
    Ok(match tried.ruleset {
        RulesetStatus::FullyEnforced if scopes() == Scope::from_all(NEWEST) => Support::Full,
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Support::Partial,
        RulesetStatus::NotEnforced => Support::Missing,
    })
}
