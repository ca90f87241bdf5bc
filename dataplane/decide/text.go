package decide

import (
	"strconv"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// armText names an arm in a trace.
func armText(a *snapshot.Arm) string {
	if a.Index == 0 {
		return a.Rule.Name
	}
	return a.Rule.Name + " match " + strconv.Itoa(a.Index)
}

func pathKind(a *snapshot.Arm) string {
	if a.PathKind == model.PathExact {
		return "exactly"
	}
	return "below"
}
