// Package authz writes the question that an authorization service is asked about
// one request, and reads the answer: Envoy's CheckRequest and CheckResponse, so that
// services written for Envoy answer it.
//
//   - It is a pure function of its arguments: the time and the bytes of the body are given.
//   - What is asked is what Envoy asks (envoy.service.auth.v3, contract 10.7):
//     pseudo-headers among the headers, lines of one name joined by commas, the body up to a bound.
//   - The same question is always the same bytes: entries of a map stand in the order of their keys.
//   - Nothing is left out of a question to make it fit, but of the body, which then says so.
//     A head of too many fields is no question at all.
//   - A question is about one spelling of the path. Where there are two
//     (decide.Verdict.AuthzPath) both are asked, and both must be allowed.
//   - What is not wholly understood of an answer is none.
//
// It asks nobody: the call, its time limit and what its failure means are the
// engine's. It knows of Envoy's messages their field numbers only: the generated
// types would make the proxy half as big again, and are what its tests compare with.
package authz

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"
	"time"
	"unicode/utf8"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// SourceMetadata is the namespace of the metadata that says who asks (contract 10.7).
const SourceMetadata = "aether.source"

// The bounds of a question.
const (
	// MaxFields is how many fields a head may have to be asked about: more than
	// the codecs take (contract 17).
	MaxFields = 256
	// MaxBody bounds in bytes what is sent of a body, whatever Question.MaxBody says.
	MaxBody = 64 << 10
)

// Question is what is known of a request before its rules change it. All but Path,
// Body and Whole is needed; nothing of it is changed or kept.
type Question struct {
	Flow     *model.Flow
	Head     *httpmsg.Head
	Authz    *snapshot.Authz    // the filter in force: decide.Verdict.Pipe.Authz, or one that follows it
	Workload *snapshot.Workload // the pod whose listener took the request: its source, or inbound its destination

	// Path is the second spelling, with the query, where it is this that is asked
	// about. nil: the head's own.
	Path []byte

	ID          string         // of the request, unique for a while: its x-request-id
	Time        time.Time      // when its first byte came
	Source      netip.AddrPort // of the connection's client
	Destination netip.AddrPort // what it dialled; inbound the pod's mesh port

	// Body is what of the body has come, and is cut at the smaller of the two
	// MaxBody, in bytes; 0, or the filter's NoBody: it is not sent along. Whole: there
	// is no more of it than Body.
	Body    []byte
	Whole   bool
	MaxBody int
}

// Append appends to dst the question as Envoy's ext_authz filter would put it: an
// envoy.service.auth.v3.CheckRequest in protobuf's wire format, without gRPC's
// prefix. dst shares no memory with the question.
//
// Text that is not UTF-8, which the message cannot carry, has a "!" for each such
// byte, as Envoy's has. What is appended is some 1 KiB longer at most than the
// question's texts, of which method, path and authority stand there twice, and 16
// bytes for each field and extension.
//
// It returns nil, and the request has to be refused, where the head has more than
// MaxFields fields: part of a head is not what the service is to judge. It does not
// allocate where dst has the capacity and the filter 32 extensions at most.
func Append(dst []byte, q *Question) []byte {
	if len(q.Head.Fields) > MaxFields {
		return nil
	}
	var client, server string // principals
	inbound := q.Flow.Dir == model.Inbound
	if inbound { // the hop: both ends are verified
		client, server = q.Flow.Peer, q.Workload.SPIFFEID
	}
	w := writer{dst}
	attributes := w.open(checkRequestAttributes)
	w.peer(attributesSource, q.Source, client)
	w.peer(attributesDestination, q.Destination, server)
	request := w.open(attributesRequest)
	w.timestamp(requestTime, q.Time)
	w.http(requestHTTP, q)
	w.shut(request)
	w.extensions(q.Authz.ContextExtensions)
	metadata := w.open(attributesMetadataContext)
	if !inbound {
		// The client is known by the listener that took it and has shown nothing, so
		// that it is no principal of the connection.
		w.source(q.Workload)
	}
	w.shut(metadata)
	w.shut(attributes)
	return w.b
}

// peer is one end of the connection.
func (w *writer) peer(num number, a netip.AddrPort, principal string) {
	peer := w.open(num)
	if a.IsValid() {
		address := w.open(peerAddress)
		socket := w.open(addressSocketAddress)
		host := w.open(socketAddressAddress)
		w.b = a.Addr().Unmap().AppendTo(w.b)
		clean(w.b[host:]) // a zone may be called anything
		w.shut(host)
		w.varint(socketAddressPortValue, uint64(a.Port()))
		w.shut(socket)
		w.shut(address)
	}
	text(w, peerPrincipal, principal)
	w.shut(peer)
}

func (w *writer) timestamp(num number, t time.Time) {
	at := w.open(num)
	w.integer(timestampSeconds, t.Unix())
	w.integer(timestampNanos, int64(t.Nanosecond()))
	w.shut(at)
}

// http is the request itself.
func (w *writer) http(num number, q *Question) {
	h := q.Head
	at := w.open(num)
	text(w, httpID, q.ID)
	text(w, httpMethod, h.Method)
	w.headers(q)
	text(w, httpPath, q.path())
	text(w, httpHost, h.Authority)
	text(w, httpScheme, h.Scheme)
	w.integer(httpSize, h.Length)
	text(w, httpProtocol, protocol(q.Flow.Sniff, h.Minor))
	body, _ := q.body()
	text(w, httpBody, body)
	w.shut(at)
}

// headers is the map of the headers, in the order of their names.
func (w *writer) headers(q *Question) {
	var room [lineFields + MaxFields]uint16 // Append has seen to it that they fit
	order := room[:0]
	compare := bytes.Compare
	for i := range lineFields + len(q.Head.Fields) {
		if !q.has(i) {
			continue
		}
		order = append(order, uint16(i))
		if name, _ := q.line(i); !utf8.Valid(name) {
			compare = compareText // of two names that are one in UTF-8 only one may be a key
		}
	}
	slices.SortFunc(order, func(i, j uint16) int {
		a, _ := q.line(int(i))
		b, _ := q.line(int(j))
		return cmp.Or(compare(a, b), cmp.Compare(i, j))
	})
	for k := 0; k < len(order); {
		name, line := q.line(int(order[k]))
		entry := w.open(httpHeaders)
		put(w, entryKey, name)
		value := w.open(entryValue)
		w.b = appendText(w.b, line)
		for k++; k < len(order); k++ {
			next, line := q.line(int(order[k]))
			if compare(name, next) != 0 {
				break
			}
			w.b = append(w.b, ',')
			w.b = appendText(w.b, line)
		}
		w.shut(value)
		w.shut(entry)
	}
}

// The lines of the headers are numbered: these, then the head's fields.
const (
	lineMethod = iota
	linePath
	lineAuthority
	lineScheme
	linePartial
	lineFields
)

// Names of lines that are no fields of the head, and what linePartial says: whether
// the body in the question is cut short, as Envoy has it.
var (
	nameMethod    = []byte(":method")
	namePath      = []byte(":path")
	nameAuthority = []byte(":authority")
	nameScheme    = []byte(":scheme")
	namePartial   = []byte("x-envoy-auth-partial-body")
	isPartial     = []byte("true")
	isWhole       = []byte("false")
)

// line is the name and value of a line.
func (q *Question) line(i int) (name, value []byte) {
	switch i {
	case lineMethod:
		return nameMethod, q.Head.Method
	case linePath:
		return namePath, q.path()
	case lineAuthority:
		return nameAuthority, q.Head.Authority
	case lineScheme:
		return nameScheme, q.Head.Scheme
	case linePartial:
		_, value = q.body()
		return namePartial, value
	}
	f := &q.Head.Fields[i-lineFields]
	return f.Name, f.Value
}

// has reports whether a line stands among the headers.
func (q *Question) has(i int) bool {
	name, value := q.line(i)
	if i < lineFields {
		return len(value) > 0
	}
	return string(name) != string(namePartial) // only a proxy may say that
}

// path is the spelling that is asked about.
func (q *Question) path() []byte {
	if q.Path != nil {
		return q.Path
	}
	return q.Head.Path
}

// body is what is sent of the body, and what is said of it: nil where none is to be sent.
func (q *Question) body() (sent, says []byte) {
	if q.MaxBody <= 0 || q.Authz.NoBody {
		return nil, nil
	}
	n := min(len(q.Body), q.MaxBody, MaxBody)
	if q.Whole && n == len(q.Body) {
		return q.Body, isWhole
	}
	return q.Body[:n], isPartial
}

// extensions is the map of what the filter adds for the service, in the order of its keys.
func (w *writer) extensions(m map[string]string) {
	var room [32]string
	keys := room[:0]
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		entry := w.open(attributesContextExtensions)
		put(w, entryKey, k)
		put(w, entryValue, m[k])
		w.shut(entry)
	}
}

// source is the metadata that says who asks: a google.protobuf.Struct of texts.
func (w *writer) source(p *snapshot.Workload) {
	entry := w.open(metadataFilterMetadata)
	put(w, entryKey, SourceMetadata)
	fields := w.open(entryValue)
	w.field("namespace", p.Service.Namespace)
	w.field("pod", p.Pod)
	w.field("serviceAccount", p.Service.Name)
	w.field("spiffeId", p.SPIFFEID)
	w.shut(fields)
	w.shut(entry)
}

// field is one text of a google.protobuf.Struct.
func (w *writer) field(key, value string) {
	entry := w.open(structFields)
	put(w, entryKey, key)
	at := w.open(entryValue)
	put(w, valueStringValue, value)
	w.shut(at)
	w.shut(entry)
}

// protocol is Envoy's name of the client's version of HTTP.
func protocol(s model.Sniff, minor uint8) string {
	switch {
	case s == model.SniffH2C:
		return "HTTP/2"
	case minor == 0:
		return "HTTP/1.0"
	}
	return "HTTP/1.1"
}
