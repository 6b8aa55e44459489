//! The past and possible contents of every block, by the rules of a disk with a volatile cache, for one host that waits
//! for each reply.

use sealblock_simulator::checker::Content;
use sealblock_units::{Extent, Lba};

/// The contents of one block, oldest first.
#[derive(Clone, Debug)]
struct History {
    contents: Vec<Content>,
    /// The newest content that is known to be durable; the block has this content or a later one.
    durable: usize,
}

/// The contents of every block of a volume.
#[derive(Clone, Debug)]
pub struct Model(Vec<History>);

impl Model {
    /// A new volume: all zeroes.
    pub fn new(blocks: u64) -> Model {
        Model(vec![History { contents: vec![Content::Zero], durable: 0 }; blocks as usize])
    }

    /// The volume has this number of blocks now; new ones are zeroes.
    pub fn resize(&mut self, blocks: u64) {
        self.0.resize(blocks as usize, History { contents: vec![Content::Zero], durable: 0 });
    }

    /// A change completed.
    pub fn change(&mut self, extent: Extent, content: Content) {
        extent.iter().for_each(|lba| self.0[lba.get() as usize].contents.push(content));
    }

    /// A flush completed: all changes are durable.
    pub fn flushed(&mut self) {
        self.0.iter_mut().for_each(|block| block.durable = block.contents.len() - 1);
    }

    /// This content was found after a crash, and is durable.
    pub fn found(&mut self, lba: Lba, content: Content) {
        let block = &mut self.0[lba.get() as usize];
        block.contents.push(content);
        block.durable = block.contents.len() - 1;
    }

    /// True if a block may have this content.
    pub fn permits(&self, lba: Lba, content: Content) -> bool {
        self.permitted(lba).contains(&content)
    }

    /// The possible contents of a block, the newest last.
    pub fn permitted(&self, lba: Lba) -> &[Content] {
        let block = &self.0[lba.get() as usize];
        &block.contents[block.durable..]
    }

    /// True if a block ever had this content.
    pub fn held(&self, lba: Lba, content: Content) -> bool {
        self.0[lba.get() as usize].contents.contains(&content)
    }

    /// The number of blocks.
    pub fn blocks(&self) -> u64 {
        self.0.len() as u64
    }

    /// True if a block was ever changed.
    pub fn is_touched(&self, lba: Lba) -> bool {
        self.0[lba.get() as usize].contents.len() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushed_and_found_contents_replace_earlier_ones() {
        let (lba, mut model) = (Lba::new(1), Model::new(2));
        model.change(Extent::one(lba), Content::Version(1));
        assert!(model.permits(lba, Content::Zero) && model.permits(lba, Content::Version(1)));
        model.flushed();
        assert!(!model.permits(lba, Content::Zero) && model.held(lba, Content::Zero));
        model.change(Extent::one(lba), Content::Version(2));
        model.change(Extent::one(lba), Content::Version(3));
        model.found(lba, Content::Version(2));
        assert_eq!(model.permitted(lba), [Content::Version(2)]);
        assert!(!model.held(lba, Content::Version(4)) && model.held(lba, Content::Version(3)));
        assert!(model.permits(Lba::new(0), Content::Zero) && !model.is_touched(Lba::new(0)));
    }
}
