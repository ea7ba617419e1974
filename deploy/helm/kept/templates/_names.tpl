{{/* The release's name, once where it says kept already; short enough for what is appended. */}}
{{- define "kept.name" -}}
{{- $name := ternary .Release.Name (printf "%s-kept" .Release.Name) (contains "kept" .Release.Name) -}}
{{- if gt (len $name) 40 }}{{ fail (printf "release name %s: with it pods would be named %s-0; 40 characters are the most" .Release.Name $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "kept.selector" -}}
app.kubernetes.io/name: kept
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kept.labels" -}}
{{ include "kept.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kept.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Where nodes reach each other: POD.SERVICE.NAMESPACE.svc.DOMAIN. */}}
{{- define "kept.domain" -}}
{{ include "kept.name" . }}-nodes.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- define "kept.voters" -}}
{{- $voters := list -}}
{{- range $i := until (int .Values.voters) -}}
{{- $voters = append $voters (printf "%d@%s-%d.%s:10092" $i (include "kept.name" $) $i (include "kept.domain" $)) -}}
{{- end -}}
{{- join "," $voters -}}
{{- end -}}

{{/* A quantity of Kubernetes, such as 500m or 2Gi, as a plain number. */}}
{{- define "kept.amount" -}}
{{- if kindIs "string" . -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- printf "%.3f" (mulf (float64 $number) (float64 (get $units (trimPrefix $number .)))) -}}
{{- else -}}
{{- printf "%.3f" (float64 .) -}}
{{- end -}}
{{- end -}}

{{/* What values.schema.json cannot say: values that contradict each other. */}}
{{- define "kept.check" -}}
{{- if gt (int .Values.voters) (int .Values.replicas) -}}
{{- fail (printf "voters: %d of %d nodes cannot vote; give voters a number up to replicas" (int .Values.voters) (int .Values.replicas)) -}}
{{- end -}}
{{- $factor := int (index .Values.config "default.replication.factor" | default (min 3 (int .Values.replicas))) -}}
{{- if gt $factor (int .Values.replicas) -}}
{{- fail (printf "config: default.replication.factor=%d wants that many nodes, and replicas is %d" $factor (int .Values.replicas)) -}}
{{- end -}}
{{- $isr := int (index .Values.config "min.insync.replicas" | default (ternary 2 1 (ge (int .Values.replicas) 3))) -}}
{{- if gt $isr $factor -}}
{{- fail (printf "config: min.insync.replicas=%d of default.replication.factor=%d replicas can never be in sync" $isr $factor) -}}
{{- end -}}
{{- range $name, $limit := .Values.resources.limits -}}
{{- $request := index (default dict $.Values.resources.requests) $name -}}
{{- if and $request (gt (float64 (include "kept.amount" $request)) (float64 (include "kept.amount" $limit))) -}}
{{- fail (printf "resources: %s: requests has %v, which is more than the %v of limits" $name $request $limit) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.external.enabled (eq .Values.external.type "NodePort") -}}
{{- $first := int .Values.external.firstNodePort -}}
{{- $last := sub (add $first (int .Values.replicas)) 1 -}}
{{- if or (lt $first 30000) (gt (int $last) 32767) -}}
{{- fail (printf "external.firstNodePort: %d nodes from %d on want ports up to %d; Kubernetes has 30000 to 32767" (int .Values.replicas) $first $last) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kept.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kept.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}
