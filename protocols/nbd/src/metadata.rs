//! LIST_META_CONTEXT and SET_META_CONTEXT: `base:allocation` is the one context there is.

use crate::bytes::FieldReader;
use crate::wire::{self, BASE_ALLOCATION, STRING_BYTES};

/// What is asked about an export's contexts.
pub(crate) struct ContextQuery<'a> {
    pub(crate) export: &'a [u8],
    queries: u32,
    /// Whether one names the context.
    exact: bool,
    /// Whether one asks for all of the namespace `base`.
    wild: bool,
}

impl<'a> ContextQuery<'a> {
    /// `None` when it is malformed. Queries of other namespaces are ignored, as "Metadata querying" demands.
    pub(crate) fn read(data: &'a [u8]) -> Option<ContextQuery<'a>> {
        let mut fields = FieldReader(data);
        let export = fields.string().filter(|name| name.len() <= STRING_BYTES)?;
        let queries = fields.u32()?;
        let (mut exact, mut wild) = (false, false);
        for _ in 0..queries {
            let query = fields.string()?;
            exact |= query == BASE_ALLOCATION.as_bytes();
            wild |= query == b"base:";
        }
        fields.end()?;
        Some(ContextQuery { export, queries, exact, wild })
    }

    /// Whether a list has the context.
    pub(crate) fn lists(&self) -> bool {
        self.queries == 0 || self.exact || self.wild
    }

    /// Whether the context is chosen.
    pub(crate) fn selects(&self) -> bool {
        self.exact
    }
}

/// The data of the reply that names the context, with its identifier once it is chosen and 0 in a list.
pub(crate) fn context(is_chosen: bool) -> Vec<u8> {
    let id = if is_chosen { wire::BASE_ALLOCATION_ID } else { 0 };
    [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(count: u32, queries: &[&str]) -> Vec<u8> {
        let mut data = vec![0, 0, 0, 1, b'x'];
        data.extend(count.to_be_bytes());
        for query in queries {
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query.bytes());
        }
        data
    }

    fn answers(queries: &[&str]) -> (bool, bool) {
        let data = query(queries.len() as u32, queries);
        let query = ContextQuery::read(&data).unwrap();
        assert_eq!(query.export, b"x");
        (query.lists(), query.selects())
    }

    #[test]
    fn contexts_are_matched_exactly_or_by_their_namespace() {
        assert_eq!(answers(&[]), (true, false), "none asked: all are listed, none is set");
        assert_eq!(answers(&["qemu:a", "base:allocation"]), (true, true));
        assert_eq!(answers(&["base:"]), (true, false));
        assert_eq!(answers(&["base:allocations", "", "other"]), (false, false));
    }

    #[test]
    fn malformed_queries_are_none() {
        let good = query(1, &["base:"]);
        assert!(ContextQuery::read(&good).is_some());
        for len in 0..good.len() {
            assert!(ContextQuery::read(&good[..len]).is_none(), "{len} bytes of it");
        }
        assert!(ContextQuery::read(&[&good[..], &[0]].concat()).is_none());
        assert!(ContextQuery::read(&query(u32::MAX, &["base:"])).is_none());
    }
}
