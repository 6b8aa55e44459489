//! The lineage of a mirror's content: which openings have changed it, newest first.
//!
//! A *session* is one opening of the mirror that changed what it holds (or let it be seen, where a crash had left that open).
//! It draws an identity at its first change. The first labels that name it call it unconfirmed: nothing was changed yet. The
//! next ones confirm it, and only then is anything changed. So a label whose newest confirmed session another label does not
//! know of is of a history that the other one lacks, however their generations compare: an older image of a leg that was
//! put back and written alone is told from one that only fell behind.

/// Sessions that a label knows of, at most. An image that is older than all of them is refused: nothing tells any more
/// whether it was written alone.
pub const MOST_SESSIONS: usize = 256;

/// Set in the bytes of a session that is not confirmed. Identities have the other 63 bits.
const UNCONFIRMED: u64 = 1 << 63;

/// An opening of the mirror that changed it, or was about to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Session {
    /// Drawn at random, 63 bits.
    pub id: u64,
    /// Something may have been changed in it.
    pub is_confirmed: bool,
}

/// The sessions that a label knows of, newest first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lineage {
    sessions: Vec<Session>,
}

impl Lineage {
    /// The sessions, newest first.
    pub fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// The last session that may have changed something; nothing where none has.
    pub fn newest(&self) -> Option<u64> {
        self.sessions.iter().find(|session| session.is_confirmed).map(|session| session.id)
    }

    /// Whether a session is known, confirmed or not.
    pub fn knows(&self, id: u64) -> bool {
        self.sessions.iter().any(|session| session.id == id)
    }

    /// Whether older sessions may have been forgotten.
    pub fn is_full(&self) -> bool {
        self.sessions.len() >= MOST_SESSIONS
    }

    /// Begins a session of this identity, or one near it that is not there yet. Nothing is changed in it before it is confirmed.
    pub fn begin(&mut self, drawn: u64) {
        let mut id = drawn & !UNCONFIRMED;
        while self.knows(id) {
            id = id.wrapping_add(1) & !UNCONFIRMED;
        }
        self.sessions.insert(0, Session { id, is_confirmed: false });
        self.sessions.truncate(MOST_SESSIONS);
    }

    /// From now on the session that was begun last may change something.
    pub fn confirm(&mut self) {
        if let Some(session) = self.sessions.first_mut() {
            session.is_confirmed = true;
        }
    }

    /// The bytes in a label: eight for each session.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let word = |session: &Session| session.id | if session.is_confirmed { 0 } else { UNCONFIRMED };
        self.sessions.iter().flat_map(|session| word(session).to_le_bytes()).collect()
    }

    /// The lineage that these bytes say; nothing where there are too many, or one twice.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Lineage> {
        let mut lineage = Lineage::default();
        for word in bytes.as_chunks::<8>().0 {
            let word = u64::from_le_bytes(*word);
            let session = Session { id: word & !UNCONFIRMED, is_confirmed: word & UNCONFIRMED == 0 };
            if lineage.is_full() || lineage.knows(session.id) {
                return None;
            }
            lineage.sessions.push(session);
        }
        Some(lineage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_counts_once_it_is_confirmed_and_is_known_before() {
        let mut lineage = Lineage::default();
        assert_eq!(lineage.newest(), None);
        lineage.begin(7);
        assert!(lineage.knows(7) && lineage.newest().is_none());
        lineage.confirm();
        lineage.begin(7);
        assert_eq!((lineage.newest(), lineage.sessions()[0].id), (Some(7), 8), "no session has another's identity");
        lineage.begin(u64::MAX);
        lineage.confirm();
        assert_eq!(lineage.newest(), Some(u64::MAX >> 1));
        assert_eq!(Lineage::from_bytes(&lineage.to_bytes()), Some(lineage));
    }

    #[test]
    fn the_oldest_sessions_are_forgotten_and_no_more_are_read() {
        let mut lineage = Lineage::default();
        for id in 0..300 {
            lineage.begin(id);
            lineage.confirm();
        }
        assert!(lineage.is_full() && lineage.knows(299) && lineage.knows(44) && !lineage.knows(43));
        let mut bytes = lineage.to_bytes();
        assert_eq!(Lineage::from_bytes(&bytes), Some(lineage));
        bytes.extend_from_slice(&1000_u64.to_le_bytes());
        assert_eq!(Lineage::from_bytes(&bytes), None);
        assert_eq!(Lineage::from_bytes(&[5; 16]), None, "one twice");
    }
}
