// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where distributions keep the image of the kernel that runs.

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Context, bail};
use vcpufreq_host::HostRoot;

/// With the release in place of `{}`: Debian, Ubuntu, Arch; Fedora; vendors' packages. Last one
/// without a release, of Armbian, which has one kernel installed.
const PLACES: [&str; 5] = [
    "boot/vmlinuz-{}",
    "lib/modules/{}/vmlinuz",
    "boot/Image-{}",
    "lib/modules/{}/Image",
    "boot/Image",
];

/// The first of the places where a file is.
///
/// # Errors
/// When there is none, with the places, and when this user may not read it.
pub fn find(root: &HostRoot, release: &str) -> anyhow::Result<PathBuf> {
    let places = PLACES.map(|place| place.replace("{}", release));
    let mut paths = places.iter().map(|place| root.path(place));
    let path = paths.find(|path| path.is_file()).with_context(|| {
        let places = places.iter().map(|place| format!("/{place}"));
        let places = places.collect::<Vec<_>>().join(", ");
        format!("the image of Linux {release} is at none of {places}; name --kernel and --initrd")
    })?;
    match File::open(&path) {
        Ok(_) => Ok(path),
        Err(error) => bail!(
            "can't read {} ({error}); run as root, or chmod a+r it",
            path.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    //! Promise: the running kernel's own image is found before one without a release.
    use vcpufreq_host::fakes::FakeHost;

    use super::find;

    #[test]
    fn an_image_with_the_release_comes_first() {
        let host = FakeHost::two_plus_two();
        let error = find(&host.root(), "6.1").unwrap_err();
        assert!(error.to_string().contains("/boot/vmlinuz-6.1, "), "{error}");
        for (place, name) in [("boot/Image", "Image"), ("boot/vmlinuz-6.1", "vmlinuz-6.1")] {
            host.write(place, "");
            assert!(find(&host.root(), "6.1").unwrap().ends_with(name));
        }
    }
}
