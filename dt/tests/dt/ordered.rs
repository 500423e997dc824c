// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A tree with any names, in its own order: vm-fdt writes only those of the specification.

/// A node with everything below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrderedNode {
    pub name: String,
    pub properties: Vec<(String, Vec<u8>)>,
    pub children: Vec<OrderedNode>,
}

/// A node of this name.
pub fn node(name: &str) -> OrderedNode {
    OrderedNode {
        name: name.to_owned(),
        ..OrderedNode::default()
    }
}

impl OrderedNode {
    pub fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref().to_vec();
        self.properties.push((name.to_owned(), value));
        self
    }

    /// As [`OrderedNode::with`], of these cells.
    pub fn cells(self, name: &str, cells: &[u32]) -> Self {
        let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_be_bytes()).collect();
        self.with(name, bytes)
    }

    pub fn child(mut self, child: OrderedNode) -> Self {
        self.children.push(child);
        self
    }

    pub fn children(mut self, children: impl IntoIterator<Item = OrderedNode>) -> Self {
        self.children.extend(children);
        self
    }

    /// The node with this path below this one.
    pub fn at(&self, path: &str) -> &Self {
        path.split('/').fold(self, |node, name| {
            let mut children = node.children.iter();
            let found = children.find(|child| child.name == name);
            found.unwrap_or_else(|| panic!("{path} in {node:#?}"))
        })
    }

    pub fn property(&self, name: &str) -> Option<&[u8]> {
        let mut properties = self.properties.iter();
        let found = properties.find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_slice())
    }

    /// The flattened form of a root.
    pub fn blob(&self) -> Vec<u8> {
        let (mut structure, mut strings) = (Vec::new(), Vec::new());
        self.write(&mut structure, &mut strings);
        structure.extend(9_u32.to_be_bytes());
        let (structure_size, strings_size) = (structure.len(), strings.len());
        let sizes = [56 + structure_size + strings_size, 56, 56 + structure_size];
        let [total, at, strings_at] = sizes.map(|size| u32::try_from(size).unwrap());
        let sizes = [strings_size, structure_size];
        let [strings_size, structure_size] = sizes.map(|size| u32::try_from(size).unwrap());
        let header = [
            0xd00d_feed,
            total,
            at,
            strings_at,
            40,
            17,
            16,
            0,
            strings_size,
            structure_size,
        ];
        let header = header.map(u32::to_be_bytes);
        [header.as_flattened(), &[0; 16], &structure, &strings].concat()
    }

    fn write(&self, structure: &mut Vec<u8>, strings: &mut Vec<u8>) {
        fn padded(structure: &mut Vec<u8>, bytes: &[u8]) {
            structure.extend(bytes);
            structure.resize(structure.len().next_multiple_of(4), 0);
        }
        structure.extend(1_u32.to_be_bytes());
        padded(structure, &[self.name.as_bytes(), &[0]].concat());
        for (name, value) in &self.properties {
            let cells = [3, value.len(), strings.len()];
            for cell in cells {
                structure.extend(u32::try_from(cell).unwrap().to_be_bytes());
            }
            padded(structure, value);
            strings.extend(name.as_bytes());
            strings.push(0);
        }
        for child in &self.children {
            child.write(structure, strings);
        }
        structure.extend(2_u32.to_be_bytes());
    }

    /// The root of a flattened tree.
    pub fn read(blob: &[u8]) -> Self {
        let mut at = word(blob, 8) + 4;
        Self::rest(blob, &mut at)
    }

    fn rest(blob: &[u8], at: &mut usize) -> Self {
        let mut read = node(&text(blob, *at));
        *at = (*at + read.name.len() + 1).next_multiple_of(4);
        loop {
            *at += 4;
            match word(blob, *at - 4) {
                1 => read.children.push(Self::rest(blob, at)),
                2 => return read,
                3 => {
                    let (len, name) = (word(blob, *at), word(blob, *at + 4));
                    let value = &blob[*at + 8..*at + 8 + len];
                    read = read.with(&text(blob, word(blob, 12) + name), value);
                    *at = (*at + 8 + len).next_multiple_of(4);
                }
                4 => {}
                other => panic!("token {other}"),
            }
        }
    }
}

fn word(blob: &[u8], at: usize) -> usize {
    let word = u32::from_be_bytes(blob[at..at + 4].try_into().unwrap());
    usize::try_from(word).unwrap()
}

fn text(blob: &[u8], at: usize) -> String {
    let end = blob[at..].iter().position(|&byte| byte == 0).unwrap();
    String::from_utf8(blob[at..at + end].to_vec()).unwrap()
}
