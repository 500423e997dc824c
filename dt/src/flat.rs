// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes the flattened form of a tree that was read and edited (devicetree specification,
//! chapter 5).
//!
//! Apart from vm-fdt, which holds names and memory reservations to rules that trees in use break.

use std::collections::HashMap;

use crate::base::{
    BEGIN_NODE, Base, BaseNode, END, END_NODE, MAGIC, MAX_TREE, OLDEST_VERSION, PROPERTY,
    TreeError, VERSION,
};

const HEADER: usize = 40;

/// The tree without padding.
pub fn flatten(tree: &Base<'_>) -> Result<Vec<u8>, TreeError> {
    let reservations = tree.reservations.iter().chain(&[(0, 0)]);
    let reservations: Vec<u8> = reservations
        .flat_map(|&(address, size)| [address, size])
        .flat_map(u64::to_be_bytes)
        .collect();
    let mut flat = Flattener {
        before: HEADER + reservations.len(),
        ..Flattener::default()
    };
    flat.node(&tree.root)?;
    flat.word(END);
    let size = flat.fits()?;
    let (structure, strings) = (flat.structure.len(), flat.strings.len());
    let header = [
        MAGIC,
        word(size),
        word(flat.before),
        word(flat.before + structure),
        word(HEADER),
        VERSION,
        OLDEST_VERSION,
        tree.boot_cpu,
        word(strings),
        word(structure),
    ];
    let header = header.map(u32::to_be_bytes).concat();
    Ok([header, reservations, flat.structure, flat.strings].concat())
}

/// The blocks of structure and strings.
#[derive(Default)]
struct Flattener<'t> {
    /// Bytes before them.
    before: usize,
    structure: Vec<u8>,
    strings: Vec<u8>,
    /// Where a name is in the strings.
    names: HashMap<&'t str, u32>,
}

impl<'t> Flattener<'t> {
    fn node(&mut self, node: &'t BaseNode<'_>) -> Result<(), TreeError> {
        self.word(BEGIN_NODE);
        self.bytes(node.name.as_bytes());
        self.bytes_end(1);
        for (name, value) in &node.properties {
            let name = self.name(name);
            self.word(PROPERTY);
            self.word(word(value.len()));
            self.word(name);
            self.bytes(value);
            self.bytes_end(0);
            // At once: few bytes may refer to many that are in use more than once.
            self.fits()?;
        }
        for child in &node.children {
            self.node(child)?;
        }
        self.word(END_NODE);
        Ok(())
    }

    fn name(&mut self, name: &'t str) -> u32 {
        *self.names.entry(name).or_insert_with(|| {
            let at = word(self.strings.len());
            self.strings.extend_from_slice(name.as_bytes());
            self.strings.push(0);
            at
        })
    }

    fn word(&mut self, word: u32) {
        self.bytes(&word.to_be_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.structure.extend_from_slice(bytes);
    }

    /// So many zeros, and those that align what follows.
    fn bytes_end(&mut self, zeros: usize) {
        let end = (self.structure.len() + zeros).next_multiple_of(4);
        self.structure.resize(end, 0);
    }

    /// The size of the whole tree, if Linux takes it.
    fn fits(&self) -> Result<usize, TreeError> {
        match self.before + self.structure.len() + self.strings.len() {
            size if size > MAX_TREE => Err(TreeError::TooLarge { size }),
            size => Ok(size),
        }
    }
}

/// All sizes are checked before they are used.
fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    //! A tree without surprises is vm-fdt's to the byte.
    use vm_fdt::{FdtReserveEntry, FdtWriter};

    use super::*;

    #[test]
    fn it_is_what_vm_fdt_writes() {
        let reserved = [(0x4800_0000, 0x1_0000), (1, 2)];
        let entries = reserved.map(|(address, size)| FdtReserveEntry::new(address, size).unwrap());
        let mut fdt = FdtWriter::new_with_mem_reserv(&entries).unwrap();
        fdt.set_boot_cpuid_phys(7);
        let root = fdt.begin_node("").unwrap();
        fdt.property_string("model", "a").unwrap();
        fdt.property_null("empty").unwrap();
        let child = fdt.begin_node("soc@1000").unwrap();
        fdt.property_string("model", "abc").unwrap();
        let grandchild = fdt.begin_node("leaf").unwrap();
        fdt.end_node(grandchild).unwrap();
        fdt.end_node(child).unwrap();
        fdt.end_node(root).unwrap();
        let blob = fdt.finish().unwrap();
        let tree = Base::read(&blob).unwrap();
        assert_eq!(tree.reservations, reserved);
        assert_eq!(flatten(&tree).unwrap(), blob);
    }

    /// Each property's name is another end of one string: 8 bytes in the base, 100 here.
    #[test]
    fn names_in_few_bytes_take_no_memory_without_end() {
        let long = "n".repeat(200);
        let names: Vec<String> = (0..40_000).map(|n| format!("{n:05}{long}")).collect();
        let properties = names
            .iter()
            .map(|name| (name.as_str(), [].as_slice().into()));
        let tree = Base {
            reservations: Vec::new(),
            boot_cpu: 0,
            root: BaseNode {
                name: "".into(),
                properties: properties.collect(),
                children: Vec::new(),
            },
        };
        let Err(TreeError::TooLarge { size }) = flatten(&tree) else {
            panic!("8 MB are written");
        };
        assert!(size < MAX_TREE + 300, "{size}");
    }
}
