package journal

import "strings"

// Flags are Envoy's response flags of a request, or of a connection that carried
// none: the vocabulary that dashboards and the access log of contract 14.1 and
// 14.2 speak. Only those that can occur here have a constant.
type Flags uint32

// The flags, in the order in which Envoy prints them
// (envoy/stream_info/stream_info.h; the access log's documentation of %RESPONSE_FLAGS%).
const (
	UH   Flags = 1 << iota // no healthy upstream
	UT                     // the upstream took too long
	LR                     // reset by ourselves
	UR                     // reset by the upstream
	UF                     // no connection to the upstream
	UC                     // the upstream's connection ended
	UO                     // too many wait for the upstream, or are tried again
	NR                     // no route
	UAEX                   // the authorization service refused, or could not be asked
	DC                     // the client went
	URX                    // tried again as often as may be, and failed still
	SI                     // nothing moved for too long
	DPE                    // the client broke the protocol
	UPE                    // the upstream broke the protocol
	NC                     // the destination's rows are not here
	OM                     // shed: the proxy has too much
	DR                     // the client reset the stream
	flagEnd
)

var flagNames = [...]string{"UH", "UT", "LR", "UR", "UF", "UC", "UO", "NR", "UAEX", "DC", "URX", "SI", "DPE", "UPE", "NC", "OM", "DR"}

// String is the flags as Envoy prints them, short and separated by commas; "-": none.
func (f Flags) String() string {
	switch {
	case f == 0:
		return "-"
	case f&(f-1) == 0 && f < flagEnd: // one, without allocating
		i := 0
		for f>>i != 1 {
			i++
		}
		return flagNames[i]
	}
	var b strings.Builder
	for i, name := range flagNames {
		if f&(1<<i) != 0 {
			if b.Len() > 0 {
				b.WriteByte(',')
			}
			b.WriteString(name)
		}
	}
	return b.String()
}

// ViaUpstream are the details of an answer that is the upstream's own.
const ViaUpstream = "via_upstream"

// Of a reset Envoy says when it came and, in braces, why.
const (
	before = "upstream_reset_before_response_started"
	after  = "upstream_reset_after_response_started"
)

// fault is what Envoy says of a failure between a proxy and its upstream.
type fault struct {
	flags         Flags
	before, after string // details: no answer had begun; one had
}

func reset(f Flags, why string) fault {
	return fault{f, before + "{" + why + "}", after + "{" + why + "}"}
}

func always(f Flags, details string) fault { return fault{f, details, details} }

var (
	noUpstream  = reset(UF, "remote_connection_failure")
	termination = reset(UC, "connection_termination")
	overflow    = reset(UO, "overflow")
	localReset  = reset(LR, "local_reset")
	tooLong     = always(UT, "response_timeout")
	forbidden   = always(UAEX, "ext_authz_denied")
	brokenHead  = always(DPE, "codec_error")
)

// faults is by Entry.Cause, or by Entry.Code where no cause is known. It is the one
// place that knows what Envoy calls what went wrong: whoever adds a cause adds a line,
// and a cause without one is an UF before an answer, an UC after its beginning.
var faults = map[string]fault{
	// Nobody to send it to.
	"no-endpoint": always(UH, "no_healthy_upstream"),
	"await-rows":  always(NC, "cluster_not_found"),

	// No connection: meshhop.Reason, and exchange.Connect.
	"connect":           noUpstream,
	"connect-timeout":   reset(UF, "connection_timeout"),
	"handshake-timeout": reset(UF, "connection_timeout"),
	"no-certificate":    reset(UF, "local_connection_failure"),
	"cancelled":         reset(UF, "local_connection_failure"),
	"descriptors":       reset(UF, "local_connection_failure"),
	"local-ports":       reset(UF, "local_connection_failure"),
	"wrong-peer":        noUpstream,
	"peer-without-id":   noUpstream,
	"untrusted":         noUpstream,
	"expired":           noUpstream,
	"unknown-sni":       noUpstream,
	"refused-by-peer":   noUpstream,
	"closed-by-peer":    noUpstream,
	"tls":               noUpstream,

	// More than we take.
	"handshake-limit": overflow,
	"hop-full":        overflow,
	"overflow":        overflow,
	"overload":        always(OM, "overload"),

	// A connection that was there: exchange.Code, and what the engine and a relay say.
	"closed":             termination,
	"stale":              termination,
	"unsent":             termination,
	"cancel":             termination,
	"silent":             termination,
	"endpoint-gone":      termination,
	"endpoint-unhealthy": termination,
	"identity-expired":   termination,
	"identity-revoked":   termination,
	"idle":               {SI, "stream_idle_timeout", "stream_idle_timeout"},
	"refused":            reset(UR, "remote_refused_stream_reset"),
	"too-large":          reset(UR, "remote_reset"),
	"reset":              reset(UR, "remote_reset"),
	"lost":               termination,
	"truncated":          termination,
	"broken":             termination,
	"protocol":           {UPE, before + "{protocol_error}", after + "{protocol_error}"},
	"internal":           localReset,
	"failed":             localReset,

	// Time.
	"timeout":       tooLong,
	"route-timeout": tooLong,
	"grpc-deadline": tooLong,
	"try-timeout":   always(UT, "upstream_per_try_timeout"),

	// Authorization.
	"ext-authz-unavailable": always(UAEX, "ext_authz_error"),
	"ext-authz-denied":      forbidden,

	// An Upgrade that the other side's HTTP/2 does not carry (decision 012).
	"upgrade-not-supported": always(0, "upgrade_failed"),

	// Heads that no request was made of (engine.ConnInfo.OnRefused).
	"bad-request":    brokenHead,
	"head-too-large": brokenHead,
	"head-timeout":   always(0, "request_header_timeout"),
	"no-request":     always(DPE, "no_request"),
}

// answers is what Envoy says of an answer that is the proxy's own and no failure of the
// upstream's, by Entry.Reason. What is not here is a direct response, which has no flag.
var answers = map[string]fault{
	"no-rule":       always(NR, "route_not_found"),
	"no-such-name":  always(NR, "route_not_found"),
	"connect":       always(NR, "route_not_found"),
	"no-endpoint":   always(UH, "no_healthy_upstream"),
	"await-rows":    always(NC, "cluster_not_found"),
	"unknown-sni":   always(NR, "filter_chain_not_found"),
	"rbac-denied":   always(0, "rbac_access_denied_matched_policy"),
	"path-spelling": always(0, "rbac_access_denied_matched_policy"),
}

// retried are the failures after which another try may be made (contract 5.7).
const retried = UF | UO | UR | UC

// direct is any other answer of the proxy's.
var direct = always(0, "direct_response")

// Classify sets Flags and Details from what else the entry says. Whoever tells an
// entry calls it first. It is a function of the entry alone and does not allocate.
//
// What decides, in this order: an answer that came whole from the upstream has no
// flag; who left first; what went wrong (Cause, else Code); how it was decided (Reason).
func (e *Entry) Classify() {
	e.Flags, e.Details = e.classify()
}

func (e *Entry) classify() (Flags, string) {
	if e.Request && !e.Local && e.Status != 0 && e.Ended == "complete" {
		return 0, ViaUpstream
	}
	begun := e.Request && e.Status != 0 && !e.Local // an answer from the upstream has begun
	switch {
	case e.Action == "refuse" && e.Cause != "" && !e.Request: // a handshake that came to nothing
		return 0, "downstream_transport_failure"
	case e.Ended == "client" && e.Cause != "" && !e.Request: // a connection that the client broke
		if f, ok := faults[e.Cause]; ok && f.flags&DPE != 0 {
			return f.flags, f.before
		}
		return DC, "downstream_remote_disconnect"
	case e.Ended == "client" && e.Request && e.Code == "protocol":
		return brokenHead.flags, brokenHead.before
	case e.Ended == "client" && e.Request && e.Code == "reset":
		return DR, "http2.remote_reset"
	case e.Ended == "client" && e.Request:
		return DC, "downstream_remote_disconnect"
	case e.Ended != "complete" && e.Request && e.Cause == "" && e.Code == "timeout":
		return SI, "stream_idle_timeout"
	}
	what := e.Cause
	if what == "" && e.Ended != "complete" {
		what = e.Code
	}
	if what != "" {
		f, ok := faults[what]
		switch {
		case !ok && begun:
			f = termination
		case !ok:
			f = noUpstream
		}
		if begun {
			return f.flags, f.after
		}
		if e.Exhausted && f.flags&retried != 0 {
			f.flags |= URX
		}
		return f.flags, f.before
	}
	if e.Action == "refuse" || e.Local {
		if f, ok := answers[e.Reason]; ok {
			return f.flags, f.before
		}
		return direct.flags, direct.before
	}
	return 0, "" // a connection that ended in order
}

// Failed reports whether the entry, classified, is what somebody will ask about: a
// response flag, a status of 500 or more, or a refusal (contract 14.2).
func (e *Entry) Failed() bool {
	return e.Flags != 0 || e.Status >= 500 || e.Action == "refuse"
}
