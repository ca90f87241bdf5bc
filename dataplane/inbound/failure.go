package inbound

import (
	"errors"
	"strconv"

	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// failure is what a delivery that ended without an answer is answered with.
type failure struct {
	status         int
	flags, details string // of the outcome: what the source judges retries by (contract 5.7)
	text           string
}

// failureOf classes the end of the delivery that v says. The flags are Envoy's: UF and UO
// say that the application has not seen the request; UC that it may have; UR
// that it reset the stream, with REFUSED_STREAM in the details if it says that it
// processed nothing; UPE and UT are never retried.
func failureOf(code exchange.Code, cause error, v *decide.Verdict) failure {
	why := engine.FaultOf(cause)
	if why != "" {
		why = ": " + why
	}
	switch code {
	case exchange.Connect:
		where := "on port " + strconv.Itoa(int(v.Deliver.Port)) + " of 127.0.0.1"
		if v.Deliver.Socket != nil {
			where = "at " + v.Deliver.Socket.Name + " of its volume"
		}
		return failure{503, "UF", "upstream_connection_failure", "the application does not listen " + where + "\n"}
	case exchange.Protocol:
		return failure{502, "UPE", "upstream_protocol_error", "the application's answer is not valid HTTP" + why + "\n"}
	case exchange.Timeout:
		return failure{504, "UT", "response_timeout", "the application did not answer in time\n"}
	case exchange.Refused:
		if errors.Is(cause, engine.ErrHopFull) {
			return failure{503, "UO", "upstream_overflow", "too many requests wait for the application\n"}
		}
		return failure{503, "UR", "upstream_reset_before_response_started{REFUSED_STREAM}", "the application refused the request\n"}
	case exchange.Unsent: // the source, which keeps the body, sends it again
		return failure{503, "UR", "upstream_reset_before_response_started{REFUSED_STREAM}", "the application had closed the connection before the request\n"}
	case exchange.TooLarge:
		return failure{503, "UR", "upstream_reset_before_response_started{ENHANCE_YOUR_CALM}", "the application reset the request" + why + "\n"}
	}
	return failure{503, "UC", "upstream_reset_before_response_started{" + code.String() + "}", "the application closed the connection without an answer" + why + "\n"}
}

// grpcReply makes h, with its outcome, the answer to a gRPC call: trailers only, with
// the status that stands for an HTTP status.
func grpcReply(h *httpmsg.Head, status int, text string) {
	h.Status = 200
	h.Add([]byte("content-type"), []byte(httpmsg.GRPC))
	h.Add([]byte("grpc-status"), strconv.AppendInt(nil, int64(httpmsg.GRPCStatus(status)), 10))
	h.Add([]byte("grpc-message"), httpmsg.GRPCMessage(text))
}
