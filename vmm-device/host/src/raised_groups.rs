// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ancestors of clamped groups. Their `cpu.uclamp.min` would cap the clamp, so it is raised while a
//! VM runs.
//!
//! More than one VM can be below such a group. The first raises it; each later one gets the group's
//! original value by [`RaisedGroups::join`]; the last restores that value.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::cgroup_error::CgroupError;
use super::cgroup_fs::{read, write};

const MIN: &str = "cpu.uclamp.min";

/// Groups, and what the minimum of each was before, in the kernel's form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RaisedGroups(BTreeMap<PathBuf, String>);

impl RaisedGroups {
    /// Those above `groups` that cap them now.
    ///
    /// # Errors
    /// [`CgroupError::File`] when a group's files can't be read; [`CgroupError::Capped`] for a
    /// group that must not be raised: its own threads would get the minimum too.
    pub fn above<'a>(groups: impl IntoIterator<Item = &'a Path>) -> Result<Self, CgroupError> {
        let mut capping = BTreeMap::new();
        for group in groups.into_iter().flat_map(ancestors) {
            let path = group.join(MIN);
            let value = read(&path)?.trim().to_owned();
            if matches!(value.as_str(), "max" | "100.00") {
                continue;
            }
            // In a domain that has threaded groups it lists the threads in that group itself.
            if !read(&group.join("cgroup.threads"))?.trim().is_empty() {
                return Err(CgroupError::Capped { path, value });
            }
            capping.insert(group.to_owned(), value);
        }
        Ok(Self(capping))
    }

    /// One group, which had this minimum.
    #[must_use]
    pub fn one(group: PathBuf, min: &str) -> Self {
        Self([(group, min.to_owned())].into())
    }

    /// All of `other` too; what is known already stays.
    pub fn add(&mut self, other: &Self) {
        for (group, min) in &other.0 {
            let known = self.0.entry(group.clone());
            known.or_insert_with(|| min.clone());
        }
    }

    /// Those of `other` that are above `groups` too; what is known already stays.
    pub fn join<'a>(&mut self, other: &Self, groups: impl IntoIterator<Item = &'a Path>) {
        let around = |group: &'a Path| group.ancestors().skip(1);
        let groups = groups.into_iter().flat_map(around);
        let above =
            groups.filter_map(|group| Some((group.to_owned(), other.0.get(group)?.clone())));
        self.add(&Self(above.collect()));
    }

    /// Its groups.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.keys().map(PathBuf::as_path)
    }

    /// Lets the minima of the groups below through.
    ///
    /// # Errors
    /// [`CgroupError::File`] with the first group that can't be written: `EACCES`, or `ENOENT` when
    /// it is gone. Those before it stay raised until [`Self::put_back`].
    pub fn raise(&self) -> Result<(), CgroupError> {
        let mut groups = self.paths();
        groups.try_for_each(|group| write(&group.join(MIN), "max"))
    }

    /// Puts back those that `others` don't need; what is gone needs nothing.
    ///
    /// # Errors
    /// [`CgroupError::File`] with the first group that can't be written (`EACCES`); the rest is put
    /// back all the same.
    pub fn put_back(&self, others: &[Self]) -> Result<(), CgroupError> {
        let needed = |group: &Path| others.iter().any(|other| other.0.contains_key(group));
        // The innermost first.
        let groups = self.0.iter().rev().filter(|(group, _)| !needed(group));
        let put = groups.map(|(group, min)| match write(&group.join(MIN), min) {
            Err(_) if !group.exists() => Ok(()),
            put => put,
        });
        put.fold(Ok(()), Result::and)
    }
}

/// The groups around `group` below the root, which has no clamps.
fn ancestors(group: &Path) -> impl Iterator<Item = &Path> {
    let above = group.ancestors().skip(1);
    above.take_while(|above| above.join(MIN).exists())
}
