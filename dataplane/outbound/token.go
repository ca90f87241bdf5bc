package outbound

import (
	"encoding/base64"
	"encoding/binary"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// maxTokens is how many tokens of one name a request may have that are looked at:
// cookies of several paths (RFC 6265 5.4).
const maxTokens = 4

// A token tells, to whoever may choose, where a client's session is (Gateway API
// sessionPersistence, GEP-1619; decision 017). It selects among the endpoints that the
// request may go to anyway, so that nothing is gained by making one up.
//
//	key      8 bytes  snapshot.Endpoint.Key
//	backend  4        of its name, for an endpoint may stand behind several
//	issued   4        Unix seconds, of the session's first answer
//	used     4        and of the one that the token came with
type token struct {
	key                   uint64
	backend, issued, used uint32
}

const (
	tokenLen  = 20
	tokenText = (tokenLen*8 + 5) / 6 // in base64url without padding
)

// session is where a request's session is.
type session struct {
	at    *snapshot.Endpoint // nil: there is none, or it cannot go on there
	token token              // what the client sent; of use where at is not nil
}

// lives reports whether the session is within the rule's limits. A clock that is behind
// that of the node which wrote the token makes it no older than new.
func (t token) lives(p *model.Persistence, now uint32) bool {
	over := func(since uint32, limit time.Duration) bool {
		return limit > 0 && now > since && time.Duration(now-since)*time.Second > limit
	}
	return !over(t.issued, p.Absolute) && !over(t.used, p.Idle)
}

func (t token) append(dst []byte) []byte {
	var b [tokenLen]byte
	binary.BigEndian.PutUint64(b[0:], t.key)
	binary.BigEndian.PutUint32(b[8:], t.backend)
	binary.BigEndian.PutUint32(b[12:], t.issued)
	binary.BigEndian.PutUint32(b[16:], t.used)
	return base64.RawURLEncoding.AppendEncode(dst, b[:])
}

func parseToken(text []byte) (token, bool) {
	var b [tokenLen + 3]byte
	if len(text) != tokenText {
		return token{}, false
	}
	if n, err := base64.RawURLEncoding.Strict().Decode(b[:], text); err != nil || n != tokenLen {
		return token{}, false
	}
	return token{binary.BigEndian.Uint64(b[0:]), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:]), binary.BigEndian.Uint32(b[16:])}, true
}

// nameHash is FNV-1a, 32 bits.
func nameHash(s string) uint32 {
	n := uint32(2166136261)
	for i := range len(s) {
		n = (n ^ uint32(s[i])) * 16777619
	}
	return n
}
