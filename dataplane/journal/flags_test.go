package journal

import (
	"strings"
	"testing"
)

// TestClassify: each flag in the condition that Envoy's documentation of %RESPONSE_FLAGS%
// and of the response code details gives it.
func TestClassify(t *testing.T) {
	request := func(f func(*Entry)) Entry {
		e := Entry{Request: true, Action: "forward", Reason: "declared-http", Ended: "complete"}
		f(&e)
		return e
	}
	// local is an answer of the proxy's with a cause; cut a request of whose answer a head had come, or not.
	local := func(status int, cause string) Entry {
		return request(func(e *Entry) { e.Local, e.Status, e.Cause = true, status, cause })
	}
	decided := func(action, reason string, status int) Entry {
		return request(func(e *Entry) { e.Local, e.Status, e.Action, e.Reason = true, status, action, reason })
	}
	cut := func(by, code string, status int) Entry {
		return request(func(e *Entry) { e.Ended, e.Code, e.Status = by, code, status })
	}
	conn := func(action, ended, cause string) Entry {
		return Entry{Action: action, Reason: "declared-tcp", Ended: ended, Cause: cause}
	}
	for _, tt := range []struct {
		name           string
		e              Entry
		flags, details string
		failed         bool
	}{
		{"the upstream's answer", request(func(e *Entry) { e.Status = 200 }), "-", "via_upstream", false},
		{"the upstream's 404", request(func(e *Entry) { e.Status = 404 }), "-", "via_upstream", false},
		{"the upstream's 503", request(func(e *Entry) { e.Status = 503 }), "-", "via_upstream", true},
		{"a try failed, the next did not", request(func(e *Entry) { e.Status, e.Code, e.Attempts = 200, "connect", 2 }), "-", "via_upstream", false},

		{"no healthy endpoint", local(503, "no-endpoint"), "UH", "no_healthy_upstream", true},
		{"no connection", local(503, "connect"), "UF", "upstream_reset_before_response_started{remote_connection_failure}", true},
		{"no connection in time", local(503, "connect-timeout"), "UF", "upstream_reset_before_response_started{connection_timeout}", true},
		{"another identity", local(503, "wrong-peer"), "UF", "upstream_reset_before_response_started{remote_connection_failure}", true},
		{"no certificate of ours", local(503, "no-certificate"), "UF", "upstream_reset_before_response_started{local_connection_failure}", true},
		{"no descriptor of ours", local(503, "descriptors"), "UF", "upstream_reset_before_response_started{local_connection_failure}", true},
		{"a cause without a line", local(503, "new-cause"), "UF", "upstream_reset_before_response_started{remote_connection_failure}", true},
		{"too many wait", local(503, "hop-full"), "UO", "upstream_reset_before_response_started{overflow}", true},
		{"the connection ended before an answer", local(503, "closed"), "UC", "upstream_reset_before_response_started{connection_termination}", true},
		{"a kept connection had ended", local(503, "stale"), "UC", "upstream_reset_before_response_started{connection_termination}", true},
		{"a kept connection had ended before anything was taken", local(503, "unsent"), "UC", "upstream_reset_before_response_started{connection_termination}", true},
		{"the peer answers no PING", local(503, "silent"), "UC", "upstream_reset_before_response_started{connection_termination}", true},
		{"REFUSED_STREAM", local(503, "refused"), "UR", "upstream_reset_before_response_started{remote_refused_stream_reset}", true},
		{"garbage from the upstream", local(502, "protocol"), "UPE", "upstream_reset_before_response_started{protocol_error}", true},
		{"no answer in time", local(504, "timeout"), "UT", "response_timeout", true},
		{"a route's timeout", local(504, "route-timeout"), "UT", "response_timeout", true},
		{"a call's own deadline", local(504, "grpc-deadline"), "UT", "response_timeout", true},
		{"an attempt's timeout", local(504, "try-timeout"), "UT", "upstream_per_try_timeout", true},
		{"our own fault", local(503, "internal"), "LR", "upstream_reset_before_response_started{local_reset}", true},
		{"no connection, and no more tries", request(func(e *Entry) { e.Local, e.Status, e.Cause, e.Exhausted = true, 503, "connect", true }),
			"UF,URX", "upstream_reset_before_response_started{remote_connection_failure}", true},
		{"no endpoint is nothing to try again", request(func(e *Entry) { e.Local, e.Status, e.Cause, e.Exhausted = true, 503, "no-endpoint", true }), "UH", "no_healthy_upstream", true},
		{"shed", local(503, "overload"), "OM", "overload", true},
		{"nobody to authorize", local(403, "ext-authz-unavailable"), "UAEX", "ext_authz_error", true},
		{"not authorized", local(403, "ext-authz-denied"), "UAEX", "ext_authz_denied", true},

		{"the answer is cut", cut("server", "closed", 200), "UC", "upstream_reset_after_response_started{connection_termination}", true},
		{"the answer is reset", cut("server", "refused", 200), "UR", "upstream_reset_after_response_started{remote_refused_stream_reset}", true},
		{"the answer's framing breaks", cut("server", "protocol", 200), "UPE", "upstream_reset_after_response_started{protocol_error}", true},
		{"the answer stops", cut("server", "timeout", 200), "SI", "stream_idle_timeout", true},
		{"nothing moves", cut("proxy", "timeout", 0), "SI", "stream_idle_timeout", true},
		{"given up by the proxy", cut("proxy", "internal", 0), "LR", "upstream_reset_before_response_started{local_reset}", true},

		{"the client went", cut("client", "cancel", 0), "DC", "downstream_remote_disconnect", true},
		{"the client went while it was answered", cut("client", "cancel", 200), "DC", "downstream_remote_disconnect", true},
		{"the client reset the stream", cut("client", "reset", 0), "DR", "http2.remote_reset", true},
		{"the client broke its body's framing", cut("client", "protocol", 0), "DPE", "codec_error", true},
		{"a head that is no HTTP", request(func(e *Entry) { e.Action, e.Local, e.Status, e.Cause = "refuse", true, 400, "bad-request" }), "DPE", "codec_error", true},
		{"a head that is too large", request(func(e *Entry) { e.Action, e.Local, e.Status, e.Cause = "refuse", true, 431, "head-too-large" }), "DPE", "codec_error", true},
		{"a head that takes too long", request(func(e *Entry) { e.Action, e.Local, e.Status, e.Cause = "refuse", true, 408, "head-timeout" }), "-", "request_header_timeout", true},

		// Refusals are upstream's direct responses, which have no flag (contract 4.4).
		{"421", decided("refuse", "port-mismatch", 421), "-", "direct_response", true},
		{"500 of a filter", decided("refuse", "invalid-backend", 500), "-", "direct_response", true},
		{"a redirection", decided("reply", "redirect", 302), "-", "direct_response", false},
		{"a preflight", decided("reply", "cors-preflight", 204), "-", "direct_response", false},
		{"no mesh name on the proxy port", decided("reply", "no-such-name", 404), "NR", "route_not_found", true},
		{"no rule", decided("reply", "no-rule", 404), "NR", "route_not_found", true},
		{"CONNECT", decided("reply", "connect", 404), "NR", "route_not_found", true},
		{"no endpoint, by decision", decided("reply", "no-endpoint", 503), "UH", "no_healthy_upstream", true},
		{"rows that did not come", decided("await", "await-rows", 503), "NC", "cluster_not_found", true},
		{"RBAC", decided("refuse", "rbac-denied", 403), "-", "rbac_access_denied_matched_policy", true},

		{"a relay that ended in order", conn("forward", "client", ""), "-", "", false},
		{"a relay that the server ended", conn("passthrough", "server", ""), "-", "", false},
		{"a relay that was never one", conn("forward", "server", "connect"), "UF", "upstream_reset_before_response_started{remote_connection_failure}", true},
		{"a relay without endpoints", conn("forward", "proxy", "no-endpoint"), "UH", "no_healthy_upstream", true},
		{"a relay that the server reset", conn("forward", "server", "reset"), "UR", "upstream_reset_before_response_started{remote_reset}", true},
		{"a relay that the client reset", conn("forward", "client", "reset"), "DC", "downstream_remote_disconnect", true},
		{"a caller that never asked", conn("deliver", "client", "no-request"), "DPE", "no_request", true},
		{"a handshake that failed", conn("refuse", "client", "untrusted"), "-", "downstream_transport_failure", true},
		{"a refused connection", conn("refuse", "", ""), "-", "direct_response", true},
	} {
		tt.e.Classify()
		if got := tt.e.Flags.String(); got != tt.flags || tt.e.Details != tt.details || tt.e.Failed() != tt.failed {
			t.Errorf("%s: %s %s failed %v, want %s %s %v", tt.name, got, tt.e.Details, tt.e.Failed(), tt.flags, tt.details, tt.failed)
		}
	}
}

func TestFlagsText(t *testing.T) {
	if len(flagNames) != 17 || 1<<len(flagNames) != flagEnd {
		t.Fatalf("%d names for %b", len(flagNames), flagEnd-1)
	}
	var all []string
	for i, name := range flagNames {
		if got := Flags(1 << i).String(); got != name {
			t.Errorf("%s: %s", name, got)
		}
		all = append(all, name)
	}
	if got := (flagEnd - 1).String(); got != strings.Join(all, ",") {
		t.Error(got)
	}
	for f, want := range map[Flags]string{0: "-", UF | URX: "UF,URX", DC: "DC", UAEX: "UAEX"} {
		if f.String() != want {
			t.Errorf("%s, want %s", f, want)
		}
	}
}

func TestClassifyAllocatesNothing(t *testing.T) {
	e := Entry{Request: true, Local: true, Status: 503, Cause: "connect", Ended: "complete"}
	var s string
	if n := testing.AllocsPerRun(1000, func() { e.Classify(); s = e.Flags.String() }); n != 0 || s != "UF" {
		t.Errorf("%v allocations, want 0 (%s)", n, s)
	}
}
