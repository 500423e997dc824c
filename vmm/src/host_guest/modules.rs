// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel's modules, by depmod's files.

use std::path::PathBuf;

use vcpufreq_host::HostRoot;

/// The modules of one release.
#[derive(Debug)]
pub struct Modules {
    dir: PathBuf,
    /// `modules.builtin`: a file name a line.
    builtin: String,
    /// `modules.dep`: a file and a colon, then those that it needs, the last one first.
    dep: String,
    /// `modules.alias`: `alias`, a name and a module a line.
    alias: String,
}

impl Modules {
    /// Reads depmod's files, which may not be there.
    pub fn read(root: &HostRoot, release: &str) -> Self {
        let dir = root.path(format!("lib/modules/{release}"));
        let text = |name| std::fs::read_to_string(dir.join(name)).unwrap_or_default();
        let names = ["modules.builtin", "modules.dep", "modules.alias"];
        let [builtin, dep, alias] = names.map(text);
        Self {
            dir,
            builtin,
            dep,
            alias,
        }
    }

    /// The files of a module and of those that it needs, in the order to load them; none of one
    /// that is built in. `None` where the kernel doesn't have it, or has an empty one.
    pub fn files(&self, name: &str) -> Option<Vec<PathBuf>> {
        if self.builtin.lines().any(|file| is_of(file, name)) {
            return Some(Vec::new());
        }
        if self.is_empty(name) {
            return None;
        }
        let mut lines = self.dep.lines().filter_map(|line| line.split_once(':'));
        let (file, needs) = lines.find(|(file, _)| is_of(file, name))?;
        let files = std::iter::once(file).chain(needs.split_whitespace());
        let mut files: Vec<_> = files.map(|file| self.dir.join(file)).collect();
        files.reverse();
        Some(files)
    }

    /// Whether DKMS built an empty module in its place (`guest-driver/empty`).
    pub fn is_empty(&self, name: &str) -> bool {
        let line = format!("alias empty:{name} {name}");
        self.alias.lines().any(|one| one == line)
    }
}

/// Whether a file is of this module, packed or not. `-` and `_` are the same in a module's name.
fn is_of(file: &str, name: &str) -> bool {
    let file = file.rsplit('/').next().unwrap_or_default();
    let stem = file.split(".ko").next().unwrap_or_default();
    stem.replace('-', "_") == name.replace('-', "_") && stem.len() < file.len()
}

#[cfg(test)]
mod tests {
    //! Promises: a module comes after those that it needs; an empty one is none.
    use vcpufreq_host::fakes::FakeHost;

    use super::*;

    #[test]
    fn what_a_module_needs_comes_first() {
        let host = FakeHost::two_plus_two();
        let dep = "kernel/a/some.ko.zst: kernel/b/second.ko kernel/c/first.ko\nkernel/b/second.ko: kernel/c/first.ko\n";
        host.write("lib/modules/6.1/modules.dep", dep);
        let modules = Modules::read(&host.root(), "6.1");
        let files = modules.files("some").unwrap();
        let names = files.iter().filter_map(|file| file.file_name());
        let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
        assert_eq!(names, ["first.ko", "second.ko", "some.ko.zst"]);
        assert_eq!(modules.files("other"), None);
    }

    #[test]
    fn an_empty_module_is_none() {
        let host = FakeHost::two_plus_two();
        host.write("lib/modules/6.1/modules.dep", "updates/dkms/some.ko:\n");
        let found = || Modules::read(&host.root(), "6.1").files("some");
        assert!(found().is_some());
        let alias = "alias of:N*T*Csome some\nalias empty:some some\n";
        host.write("lib/modules/6.1/modules.alias", alias);
        assert_eq!(found(), None);
    }

    #[test]
    fn a_file_has_its_modules_name() {
        for file in ["a/x-y.ko", "x_y.ko.xz", "b/c/x-y.ko.gz"] {
            assert!(is_of(file, "x_y"), "{file}");
        }
        assert!(!is_of("a/x-y", "x-y") && !is_of("a/x-yz.ko", "x-y"));
    }
}
