// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A file of QEMU's -readconfig, as the options that it stands for.

use std::{ffi::OsString, fs, path::Path};

use anyhow::{Context, bail};

/// The options of the file at `path`: `[smp-opts]` with `cpus = "2"` is `-smp cpus=2`.
///
/// # Errors
/// When it isn't a plain file, which could be read twice, or can't be read.
pub fn options_of(path: &Path) -> anyhow::Result<Vec<OsString>> {
    let shown = path.display();
    if fs::metadata(path).is_ok_and(|file| !file.is_file()) {
        bail!("-readconfig {shown} can be read once only; give QEMU a plain file");
    }
    let text = fs::read_to_string(path);
    let text = text.with_context(|| format!("can't read {shown}; correct -readconfig"))?;
    Ok(options(&text).into_iter().map(OsString::from).collect())
}

fn options(text: &str) -> Vec<String> {
    let mut sections: Vec<(&str, Vec<String>)> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(head) = line
            .strip_prefix('[')
            .and_then(|line| line.strip_suffix(']'))
        {
            let (group, id) = head.split_once(' ').unwrap_or((head, ""));
            let id = id.trim().trim_matches('"');
            let id = (!id.is_empty()).then(|| format!("id={id}"));
            sections.push((group, id.into_iter().collect()));
        } else if let (Some((_, values)), Some(value)) = (sections.last_mut(), value(line)) {
            values.push(value);
        }
    }
    let options = sections.into_iter().flat_map(|(group, values)| {
        let name = match group {
            "smp-opts" => "smp",
            "memory" => "m",
            group => group,
        };
        [format!("-{name}"), values.join(",")]
    });
    options.collect()
}

/// `key = "value"`, as in an option; a comma in it is doubled there.
fn value(line: &str) -> Option<String> {
    let (key, value) = line.split_once('=').filter(|_| !line.starts_with('#'))?;
    let value = value.trim().strip_prefix('"')?.strip_suffix('"')?;
    Some(format!("{}={}", key.trim(), value.replace(',', ",,")))
}

#[cfg(test)]
mod tests {
    //! A file is the options that it stands for; one that can't be read twice is an error.
    use super::*;

    #[test]
    fn a_section_is_an_option() {
        let text = "# made by hand\n[machine]\n  type = \"virt\"\n  memory-backend = \"r\"\n\
                    [smp-opts]\n  cpus = \"2\"\n[memory]\n  size = \"256M\"\n\
                    [object \"r\"]\n  qom-type = \"memory-backend-file\"\n  mem-path = \"/a,b\"\n";
        let expected = [
            "-machine",
            "type=virt,memory-backend=r",
            "-smp",
            "cpus=2",
            "-m",
            "size=256M",
            "-object",
            "id=r,qom-type=memory-backend-file,mem-path=/a,,b",
        ];
        assert_eq!(options(text), expected);
    }

    #[test]
    fn what_can_be_read_once_only_is_refused() {
        for (path, line) in [("/dev/null", "read once only"), ("/no/file", "can't read")] {
            let error = options_of(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
